"""The script that draws the interactive charts of a page without network, and its hash."""

import base64
import hashlib
import os
import stat
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import vl_convert

from trainable.files.paths import find_cache_folder, read_bytes, write_text

# Each chart is drawn above its picture, which stays for print and for readers without scripts. `ast` makes Vega
# interpret its expressions: without it, Vega would compile them with `new Function`, which the page's policy forbids.
_DRAW_CHARTS = """
const theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
for (const place of document.querySelectorAll("[data-chart]")) {
  const chart = JSON.parse(document.getElementById(place.dataset.chart).textContent);
  vegaEmbed(place, chart, {ast: true, actions: false, renderer: "svg", tooltip: {theme}})
    .then(() => place.parentElement.classList.add("interactive"));
}
"""


class Script(NamedTuple):
    """The script of a page, and the source that its Content-Security-Policy allows: the hash of the script."""

    text: str
    policy: str


@cache
def make_script() -> Script:
    """The script that draws all charts of a page: Vega-Lite with what it needs. It is the same for all pages.

    To put it together takes seconds, so it is kept in the cache of this machine.
    """
    # Inside HTML, this text would end the script; in a string of JavaScript, both forms are the same.
    text = _read_bundle().replace("</script", "<\\/script")
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return Script(text, f"'sha256-{digest}'")


def _read_bundle() -> str:
    try:
        folder = find_cache_folder()
    except RuntimeError:  # a user without a home folder has no cache
        return str(vl_convert.javascript_bundle(_DRAW_CHARTS))
    key = hashlib.sha256(f"{version('vl-convert-python')} {_DRAW_CHARTS}".encode()).hexdigest()[:12]
    path = folder / f"charts-{key}.js"
    with suppress(OSError, ValueError):
        if _is_own(path):
            digest, _, bundle = read_bytes(path).decode("utf-8").partition("\n")
            if digest == hashlib.sha256(bundle.encode()).hexdigest():
                return bundle
    bundle = str(vl_convert.javascript_bundle(_DRAW_CHARTS))
    with suppress(OSError):  # such as a home folder that this user may not write
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, f"{hashlib.sha256(bundle.encode()).hexdigest()}\n{bundle}")
    return bundle


def _is_own(path: Path) -> bool:
    """Whether only this user can have written the file: what it holds runs in every report."""
    status = path.lstat()
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022

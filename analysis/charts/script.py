"""The script that draws the interactive charts of a page without network, and its hash."""

import base64
import hashlib
from functools import cache
from typing import NamedTuple

import vl_convert

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

    A process puts it together once, which takes two seconds.
    """
    # Inside HTML, this text would end the script; in a string of JavaScript, both forms are the same.
    text = str(vl_convert.javascript_bundle(_DRAW_CHARTS)).replace("</script", "<\\/script")
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return Script(text, f"'sha256-{digest}'")

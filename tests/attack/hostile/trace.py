"""What a process opens, changes and imports, by an audit hook: for commands on a folder from somebody else.

Python reports what its own functions open. Files that C++ and Rust libraries open themselves are not seen: safetensors
opens the tensors of a checkpoint, whose path `read_checkpoint` has opened before for the checksum. Tables are parsed
from bytes that Python has read.
"""

import os
import site
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[3]

SYSTEM_PREFIXES = (
    "/proc/",
    "/sys/",
    "/dev/null",
    "/dev/urandom",
    "/dev/shm/",
    "/etc/localtime",
    "/etc/mime.types",
    "/etc/os-release",
    "/etc/fonts/",
    "/etc/ssl/",
    "/usr/lib/locale/",
    "/usr/lib/os-release",
    "/usr/lib/ssl/",
    "/usr/share/fonts",
    "/usr/share/locale/",
    "/usr/share/zoneinfo/",
    "/usr/local/share/fonts",
    "/var/cache/fontconfig",
)
"""Files of the operating system that Python and the libraries read: processes, devices, locales, fonts, time zones."""

USER_FOLDERS = (".cache", ".config", ".fonts", ".local")
"""Folders of a home folder in which libraries keep settings and fonts."""

CHANGE_EVENTS = (
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.mkdir",
    "os.link",
    "os.symlink",
    "os.chmod",
    "os.chown",
    "os.truncate",
    "os.utime",
    "shutil.rmtree",
    "shutil.move",
)
PROGRAM_EVENTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn")
NETWORK_EVENTS = ("socket.connect", "urllib.Request")
ALLOWED_PROGRAMS = ("git", "lscpu", "fc-list", "nvidia-smi", "uname", "ldconfig")


def list_installation_prefixes() -> tuple[str, ...]:
    """The folders of Python, of its packages and of this project."""
    folders = {sys.prefix, sys.base_prefix, *sysconfig.get_paths().values(), *site.getsitepackages(), str(ROOT)}
    return tuple(sorted({os.path.realpath(folder) + "/" for folder in folders}))


class Trace:
    """What this process does outside of some folders, from `start` on. It cannot be stopped: use a child process.

    readable: folders from which anything may be opened. writable: those below which anything may be changed. home: the
    user's home folder, of which only the folders for settings may be opened.
    """

    def __init__(self, readable: Sequence[Path], writable: Sequence[Path], home: Path) -> None:
        user_prefixes = tuple(f"{os.path.realpath(home)}/{name}" for name in USER_FOLDERS)
        self.writable = (*tuple(os.path.realpath(folder) for folder in writable), "/dev/null", *user_prefixes)
        readable_folders = tuple(os.path.realpath(folder) for folder in readable)
        self.readable = (*self.writable, *readable_folders, *SYSTEM_PREFIXES, *list_installation_prefixes())
        self.untrusted = readable_folders
        self.problems: list[str] = []
        self.modules_before = set(sys.modules)
        self._is_busy = False

    def start(self) -> None:
        """Observe from now on."""
        sys.addaudithook(self._observe)

    def list_problems(self) -> list[str]:
        """What was opened or changed outside, and which modules come from the folders."""
        self._is_busy = True
        modules = [
            name
            for name, module in list(sys.modules.items())
            if name not in self.modules_before
            and (path := getattr(module, "__file__", None))
            and os.path.realpath(path).startswith(self.untrusted)
        ]
        return [*dict.fromkeys(self.problems), *(f"imported {name}" for name in modules)]

    def _observe(self, event: str, arguments: tuple[object, ...]) -> None:
        if self._is_busy:
            return
        self._is_busy = True  # looking at a path may open or list something itself
        try:
            if event == "open":
                self._observe_open(*arguments[:3])
            elif event in CHANGE_EVENTS:
                self._observe_change(event, arguments)
            elif event in PROGRAM_EVENTS:
                program = os.path.basename(str(arguments[0]))
                if program not in ALLOWED_PROGRAMS:
                    self.problems.append(f"started {program}")
            elif event in NETWORK_EVENTS:
                self.problems.append(f"{event} {arguments[1:2]}")
            elif event == "pickle.find_class" and not _is_cache_of_compiled_code():
                self.problems.append(f"unpickled {arguments}")
        finally:
            self._is_busy = False

    def _observe_open(self, path: object, mode: object, flags: object) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            return  # a file descriptor: it was opened before
        real_path = os.path.realpath(os.fsdecode(path))
        is_written = isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))
        if is_written and not real_path.startswith(self.writable):
            self.problems.append(f"opened {real_path} for writing")
        elif not (real_path + "/").startswith(self.readable) and os.path.lexists(real_path):
            self.problems.append(f"opened {real_path}")

    def _observe_change(self, event: str, arguments: tuple[object, ...]) -> None:
        for path in arguments[:2]:
            if isinstance(path, str | bytes | os.PathLike) and event != "os.symlink":
                # The link itself is renamed or removed, not what it points to.
                folder, name = os.path.split(os.path.abspath(os.fsdecode(path)))
                changed_path = os.path.join(os.path.realpath(folder), name)
                if not changed_path.startswith(self.writable):
                    self.problems.append(f"{event} {changed_path}")


def _is_cache_of_compiled_code() -> bool:
    """Whether numba is reading its own cache, which is in the user's cache folder and never in a study's."""
    frame = sys._getframe()
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        if frame.f_globals.get("__name__") == "numba.core.caching":
            return True
    return False

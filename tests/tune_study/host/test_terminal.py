import os
import subprocess
import sys

BODY = """
import sys
from tune_study.host.terminal import protect_output
protect_output()
print("first", flush=True)
sys.stdin.readline()
for _ in range(3):
    print("x" * 100_000, flush=True)
    print("y" * 100_000, file=sys.stderr, flush=True)
sys.exit(7)
"""


def test_a_reader_that_is_gone_does_not_end_the_process() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", BODY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdout.readline() == "first\n"
    child.stdout.close()
    child.stdin.write("go\n")
    child.stdin.close()
    assert child.wait() == 7


def test_what_is_read_is_unchanged() -> None:
    body = BODY.replace('"x" * 100_000', '"x"').replace('"y" * 100_000', '"y"')
    process = subprocess.run([sys.executable, "-c", body], input="go\n", capture_output=True, text=True, env=os.environ)
    assert (process.stdout, process.stderr, process.returncode) == ("first\nx\nx\nx\n", "y\ny\ny\n", 7)

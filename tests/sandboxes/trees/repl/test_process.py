"""Tests of the REPL in a confined process: its language, its tools, its limits, and that every code is answered."""

import pytest

from sandboxes.trees.repl import process
from sandboxes.trees.repl.process import ConfinementError, Execution, Query, ReplLimits, ReplProcess, find_obstacle
from tests.sandboxes.trees.repl.test_escapes import WALK

pytestmark = pytest.mark.skipif(bool(find_obstacle()), reason=find_obstacle())

PAPERS = {
    "p1": "# A title\n\n## Abstract\nWe measure ice.\nIt melts.\n\n"
    "## 1. Results\nIce melts.\n### Speed\nICE floats.\n## End\nx",
    "p2": "Abstract:\nFire burns.\nWe show three things:\nit does.\n\nMethods:\nWe lit a match.",
    "p3": "# Title\n\nThe first paragraph.\n\nThe second one.",
    "p4": "A title\nAbstract: We measure wind.\n\nMore.",
}


def run(code: str, context: dict[str, str] | None = None) -> Execution:
    with ReplProcess(context or PAPERS) as repl:
        return repl.execute(code)


def test_variables_persist_and_the_last_expression_is_shown() -> None:
    with ReplProcess({}) as repl:
        assert repl.execute("def f(n):\n    return n + 1\nx = f(1)") == Execution("", "", None)
        assert repl.execute("print('a')\nx") == Execution("a\n2\n", "", None)
        assert repl.execute("None") == Execution("", "", None)
        assert repl.execute("    y = x\n    y * 2") == Execution("4\n", "", None)
        assert repl.execute("SHOW_VARS()") == Execution("{'f': 'function', 'x': 'int', 'y': 'int'}\n", "", None)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("x = (", "SyntaxError: '(' was never closed"),
        ("import os", "ImportError: __import__ not found"),
        ("open('x')", "NameError: name 'open' is not defined"),
        ("eval('1')", "NameError: name 'eval' is not defined"),
        ("raise SystemError('x')", "NameError: name 'SystemError' is not defined"),
        ("FINAL_VAR('x')", "NameError: there is no variable 'x'"),
        ("rlm_query('x')", "NameError: name 'rlm_query' is not defined"),
        ("extract_section('p9', 'x')", "KeyError: 'p9'"),
    ],
)
def test_an_error_is_an_observation(code: str, error: str) -> None:
    outcome = run(code)
    assert error in outcome.stderr
    assert (outcome.stdout, outcome.final, outcome.is_lost) == ("", None, False)


SHOWN = {
    "list_papers()": "['p1', 'p2', 'p3', 'p4']",
    "context['p4'][:7]": "'A title'",
    "search('one ice, two ICE', 'ice', 4)": "['e ice, ', 'o ICE']",
    "search('abc', '')": "[]",
    "search('aaa', 'a', 0)": "['a', 'a', 'a']",
    "search('a+b', '+')[0]": "'a+b'",
    "get_paper_abstract('p1')": "'We measure ice.\\nIt melts.'",
    "get_paper_abstract('p2')": "'Fire burns.\\nWe show three things:\\nit does.'",
    "get_paper_abstract('p4')": "'We measure wind.'",
    "extract_section('p1', 'Results')": "'Ice melts.\\n### Speed\\nICE floats.'",
    "extract_section('p1', 'speed')": "'ICE floats.'",
    "get_paper_abstract('p3')": "'The first paragraph.'",
    "extract_section('p2', 'METHODS')": "'We lit a match.'",
    "extract_section('p2', 'Results')": "''",
    "re.sub('a', 'b', 'aa'), math.sqrt(4), json.dumps([1]), Counter('aab')['a']": "('bb', 2.0, '[1]', 2)",
}
FINALS = {
    "FINAL('done')": ("", "done"),
    "FINAL(['a', 'b'])": ("", "['a', 'b']"),
    "FINAL(None)": ("", "None"),
    "x = {'a': 1}\nFINAL_VAR('x')": ("", "{'a': 1}"),
    "try:\n    FINAL('a')\nexcept Exception:\n    pass": ("", "a"),
    "try:\n    FINAL('a')\nexcept:\n    print('swallowed')": ("swallowed\n", "a"),
    "def f():\n    try:\n        FINAL('a')\n    finally:\n        return 1\nf()\nFINAL('b')": ("", "a"),
    "print('before')\nFINAL('a')\nprint('after')": ("before\n", "a"),
}


def test_tools_read_the_papers_and_a_final_answer_is_a_text_and_ends_the_execution() -> None:
    for code, shown in SHOWN.items():
        assert run(code) == Execution(f"{shown}\n", "", None), code
    for code, (stdout, final) in FINALS.items():
        assert run(code) == Execution(stdout, "", final), code


def test_children_are_asked_as_one_batch_and_answers_are_parsed() -> None:
    with ReplProcess(PAPERS, may_query=True) as repl:
        outcome = repl.execute("rlm_query_batched(['a', 'b'], [None, {'p1': 'x'}])")
        assert outcome == Query(("a", "b"), (None, {"p1": "x"}))
        assert repl.answer(["[1, 2]", "no literal ("]) == Execution("[[1, 2], 'no literal (']\n", "", None)
        assert repl.execute("rlm_query('c')") == Query(("c",), (None,))
        assert repl.refuse("at most 8 children") == Execution("", "ValueError: at most 8 children\n", None)
        for many in ("rlm_query_batched(['a'] * 65)", "rlm_query('a', 'b' * 3_000_000)"):
            assert "a call asks at most 64 children" in repl.execute(many).stderr
        assert repl.execute("rlm_query_batched([])") == Execution("[]\n", "", None)
        repl.execute("rlm_query_batched(['a', 'b'])")
        assert repl.answer(["{{'a': 1}}", "{[1]: 2}"]) == Execution("""["{{'a': 1}}", '{[1]: 2}']\n""", "", None)
        stderr = repl.execute("rlm_query_batched(['a'], [])").stderr
        assert "1 prompts and 0 contexts: give one context per prompt" in stderr


def test_what_overruns_a_limit_loses_its_variables_and_says_so() -> None:
    with ReplProcess({}, limits=ReplLimits(seconds=0.3, message_bytes=10_000)) as repl:
        repl.execute("x = 1")
        words = "TimeoutError: the execution took more than 0.3 seconds and was ended. All variables are lost."
        assert repl.execute("while True:\n    pass") == Execution("", words, None, True)
        assert "NameError" in repl.execute("x").stderr
        # A long output is cut, and nothing is lost.
        for code in ("print('a' * 20_000)", "print('\U0001f600' * 20_000)", "FINAL('\u4e2d' * 20_000)"):
            outcome = repl.execute(code)
            assert not outcome.is_lost
            assert 100 < len(outcome.stdout or outcome.final or "") < 10_000


def test_queries_share_the_seconds_of_their_execution() -> None:
    with ReplProcess({}, may_query=True, limits=ReplLimits(seconds=0.2)) as repl:
        outcome = repl.execute("while True:\n    for _ in range(10**6):\n        pass\n    rlm_query('x')")
        rounds = 0
        while isinstance(outcome, Query):
            rounds += 1
            outcome = repl.answer(["1"])
        assert "TimeoutError" in outcome.stderr
        assert rounds < 500


@pytest.mark.long
def test_code_that_uses_no_cpu_time_ends_too() -> None:
    with ReplProcess({}, limits=ReplLimits(seconds=0.1, wall_factor=5)) as repl:
        for code in ("sys.stdin.buffer.read()", "modules['time'].sleep(10**6)"):
            assert "TimeoutError: the execution took more than 0.1 seconds" in repl.execute(WALK + code).stderr


def test_a_context_is_read_within_the_limits() -> None:
    limits = ReplLimits(memory_bytes=64 * 2**20)
    words = r"its texts need more memory than it may use \(env.papers.execution_mib"
    with pytest.raises(ConfinementError, match=words):
        ReplProcess({"a": "x" * 2**25}, limits=limits)
    with ReplProcess({"a": "x" * 10**6}, limits=limits) as repl:
        assert repl.execute("len(context['a'])") == Execution("1000000\n", "", None)


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("print(hash('a'), {'a', 'b', 'c', 'd'})", ""),
        ("x, y = [], [context]\nprint(id(x), id(y), id(x), id([]) == id([]), id(context))", "1 2 1 False 5\n"),
        (
            "class Own:\n    def __hash__(self):\n        return 7\n"
            "x, nan = object(), float('nan')\n"
            "print(hash(x), hash(nan), hash(x), hash(len) > 9, hash(Own()), hash('a') == 'a'.__hash__(), hash((1, 2)))"
            "\nhash([])",
            f"1 2 1 True 7 True {hash((1, 2))}\n",
        ),
    ],
)
def test_two_processes_compute_the_same_and_no_id_or_hash_is_an_address(code: str, shown: str) -> None:
    outcome = run(code)
    assert outcome == run(code)
    assert outcome.stdout.endswith(shown)
    assert outcome.stderr == ("TypeError: unhashable type: 'list'\n" if "hash([])" in code else "")


def test_an_address_is_no_text_and_other_numbers_are() -> None:
    code = "print(object(), [object()], hex(id), hex(0xdeadbeef))".replace("hex(id)", "repr(print)")
    outcome = run(code + "\nFINAL(str(hash(1)) + ' 0x7ffff7a1b2c3, 0x100000 and 0x7ffff7a1b2c3d')")
    assert outcome.stdout == "<object object at 0x0> [<object object at 0x0>] <built-in function print> 0xdeadbeef\n"
    assert outcome.final == "1 0x0, 0x100000 and 0x7ffff7a1b2c3d"


def test_a_machine_that_cannot_confine_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = "libseccomp, which is missing: sudo apt-get install libseccomp2"
    # A library that loads and filters nothing is no confinement: the process ends before it runs any code.
    for library, problem in ((None, missing), ("libm.so.6", "No code can be confined here: .*seccomp_init")):
        monkeypatch.setattr(process, "_find_library", lambda library=library: library)
        with pytest.raises(ConfinementError, match=problem):
            ReplProcess({})
    monkeypatch.setattr(process.sys, "platform", "darwin")
    assert find_obstacle().startswith("Model-written code is confined by Linux alone")

"""`remesh.elastic.script`: scripts behave as under plain Python, but for the end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RUNNER = (sys.executable, "-m", "remesh.elastic.script")


BUFFERED = {"PYTHONUNBUFFERED": ""}
"""Output is buffered, as it is by default, whatever holds for the tests."""


def start(*command: str | Path, at: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*map(str, command)],
        check=False,
        cwd=at,
        env=os.environ | BUFFERED | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def both(
    at: Path, *words: str | Path, **environment: str
) -> tuple[subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]:
    """How a script ends under plain Python, and how in the runner."""
    plain = start(sys.executable, *words, at=at, **environment)
    return plain, start(*RUNNER, *words, at=at, **environment)


def assert_same(at: Path, *words: str | Path, **environment: str) -> str:
    """Both ways end with the same code and print the same; what they print."""
    plain, ours = both(at, *words, **environment)
    assert (ours.returncode, ours.stdout, ours.stderr) == (
        plain.returncode,
        plain.stdout,
        plain.stderr,
    )
    return ours.stdout + ours.stderr


SEEN = """
import os, pickle, sys
import beside
class Thing:
    pass
print(__name__, __file__, __spec__ and __spec__.name, __package__, type(__loader__).__name__)
print(sys.argv, sys.path, __doc__, sorted({*vars()} - {"__annotations__"}), __builtins__)
print(sys.modules["__main__"].__dict__ is globals(), type(pickle.loads(pickle.dumps(Thing()))))
"""


def package(at: Path) -> None:
    """A script and a package, each with a module beside it."""
    for folder in (at, at / "pack", at / "folder"):
        folder.mkdir(exist_ok=True)
        (folder / "beside.py").touch()
    (at / "pack/__init__.py").touch()
    for name in ("seen.py", "pack/__main__.py", "pack/seen.py", "folder/seen.py"):
        (at / name).write_text(SEEN)
    (at / "link.py").symlink_to("folder/seen.py")


@pytest.mark.parametrize(
    ("words", "is_safe"),
    [
        (("seen.py", "--lr", "1", "-m", "x"), False),
        (("link.py",), False),
        (("-m", "pack", "word", "-m"), False),
        (("-m", "pack.seen"), False),
        (("seen.py",), True),
        (("-m", "seen"), True),
    ],
)
def test_what_a_script_sees(tmp_path: Path, words: tuple[str, ...], is_safe: bool) -> None:
    package(tmp_path)
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    own = {"PYTHONSAFEPATH": "1", "PYTHONPATH": path} if is_safe else {}
    assert "True <class '__main__.Thing'>" in assert_same(tmp_path, *words, **own)


def test_an_exit_code_that_no_process_can_have(tmp_path: Path) -> None:
    (tmp_path / "leave.py").write_text("import sys\nprint('out')\nsys.exit(2**70)\n")
    plain, ours = both(tmp_path, "leave.py")
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout)
    assert ours.stderr == ""  # Python 3.13 complains of an overflow while it shuts down


ENDS = {
    **{
        f"exit {code}": f"import sys\nprint('out')\nsys.exit({code})\n"
        for code in ("None", "True", "300", "-1", "('what', 1)")
    },
    "an exception": "def f():\n    raise ValueError('bad')\nf()\n",
    "an exception in a chain": (
        "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise OSError() from e\n"
    ),
    "no Python": "x = = 1\n",
    "an interrupt": "raise KeyboardInterrupt\n",
    "a hook": (
        "import sys\nsys.excepthook = lambda *what: print('hook', what[:2])\nraise OSError(1)\n"
    ),
    "a hook that leaves": (
        "import sys\nsys.excepthook = lambda *what: sys.exit(7)\nraise OSError(1)\n"
    ),
    "a signal": "import os\nos.kill(os.getpid(), 9)\n",
    "an own end": "import os, atexit\natexit.register(print, 'never')\nos._exit(5)\n",
    "threads and handlers": (
        "import atexit, threading, time\n"
        "go = threading.Event()\n"
        "def work():\n    go.wait()\n    print('thread')\n"
        "threading.Thread(target=work).start()\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "atexit.register(print, 'first')\natexit.register(print, 'second')\n"
        "print('done')\ngo.set()\n"
    ),
    "a pool": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "pool = ThreadPoolExecutor(1)\npool.submit(print, 'one')\npool.submit(print, 'two')\n"
    ),
    "an error in a thread": (
        "import threading\nthreading.Thread(target=int, args=('x',)).start()\nprint('done')\n"
    ),
    "a log": (
        "import logging\nlogging.basicConfig()\nlogging.warning('warned')\nraise SystemExit(4)\n"
    ),
    "a temporary folder": (
        "import tempfile\nfolder = tempfile.TemporaryDirectory(dir='.', prefix='left')\n"
    ),
    "processes": (
        "import multiprocessing\n"
        "class Thing:\n    value = 5\n"
        "def work(thing):\n    print(__name__, thing.value)\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    process = context.Process(target=work, args=(Thing(),))\n"
        "    process.start()\n    process.join()\n    print(process.exitcode)\n"
        "    context.Process(target=work, args=(Thing(),)).start()\n"
    ),
    "a fork": (
        "import os, sys\nif os.fork() == 0:\n    sys.exit(3)\n"
        "print(os.waitstatus_to_exitcode(os.wait()[1]))\n"
    ),
    "closed output": "import os, sys\nsys.stdout.close()\nsys.exit(6)\n",
    "a C function's output": "import ctypes\nctypes.CDLL(None).printf(b'from C\\n')\n",
}


@pytest.mark.parametrize("what", ENDS)
def test_how_a_script_ends(tmp_path: Path, what: str) -> None:
    (tmp_path / "ends.py").write_text(ENDS[what])
    assert_same(tmp_path, "ends.py")
    assert not list(tmp_path.glob("left*"))


def test_an_exception_in_a_module_is_shown_as_python_shows_it(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(ENDS["an exception"])
    assert "ValueError: bad" in assert_same(tmp_path, "-m", "fails")


@pytest.mark.parametrize("words", [("missing.py",), ("-m", "missing"), ("-m", "os.missing")])
def test_what_is_not_there(tmp_path: Path, words: tuple[str, ...]) -> None:
    assert_same(tmp_path, *words)


def test_exit_handlers_of_the_environment_run_too(tmp_path: Path) -> None:
    """Those that were there before the script, coverage's say."""
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, os, sys\natexit.register(lambda: print('the environment', sys.argv[-1]))\n"
    )
    (tmp_path / "script.py").write_text("import atexit\natexit.register(print, 'the script')\n")
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    assert (
        assert_same(tmp_path, "script.py", PYTHONPATH=path)
        == "the script\nthe environment script.py\n"
    )


def test_handlers_that_fail_change_nothing(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import atexit\natexit.register(print, 'last')\natexit.register(int, 'x')\n"
    )
    plain, ours = both(tmp_path, "script.py")
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout) == (0, "last\n")
    assert "ValueError" in plain.stderr
    assert "ValueError" in ours.stderr


def test_output_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('x')\n")
    for command in ((sys.executable,), RUNNER):
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(
                [*command, "script.py"],
                check=False,
                cwd=tmp_path,
                env=os.environ | BUFFERED,
                stdout=full,
                stderr=subprocess.PIPE,
            )
        assert done.returncode == 120
        assert b"No space left" in done.stderr


def test_files_that_are_left_open_are_whole(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "text = open('text', 'w')\ntext.write('text')\nbinary = open('binary', 'r+b')\n"
        "binary.write(b'binary')\n"
    )
    for command in ((sys.executable,), RUNNER):
        (tmp_path / "binary").write_bytes(b"")
        assert start(*command, "script.py", at=tmp_path).returncode == 0
        assert (tmp_path / "text").read_text() == "text"
        assert (tmp_path / "binary").read_text() == "binary"
        (tmp_path / "text").unlink()


def test_the_interpreter_is_not_finalised(tmp_path: Path) -> None:
    """Finalising is what aborts: it is marked here by an object that outlives the script."""
    (tmp_path / "script.py").write_text(
        "class Marker:\n    def __del__(self, print=print):\n        print('finalised')\n"
        "marker = Marker()\n"
    )
    plain, ours = both(tmp_path, "script.py")
    assert (plain.stdout, ours.stdout) == ("finalised\n", "")


def test_a_process_of_a_pool_may_finish_too(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import atexit, multiprocessing\n"
        "from remesh.elastic.script import finish\n"
        "class Marker:\n    def __del__(self, print=print):\n        print('finalised')\n"
        "def work(code):\n"
        "    globals()['marker'] = Marker()\n"
        "    atexit.register(print, 'handler')\n"
        "    finish(code)\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    for code in (0, 3):\n"
        "        process = context.Process(target=work, args=(code,))\n"
        "        process.start()\n        process.join()\n        print(process.exitcode)\n"
    )
    done = start(sys.executable, "script.py", at=tmp_path)
    assert (done.stdout, done.stderr) == ("handler\n0\nhandler\n3\n", "")


def test_without_a_script_it_says_what_it_wants(tmp_path: Path) -> None:
    for words in ((), ("-m",)):
        done = start(*RUNNER, *words, at=tmp_path)
        assert done.returncode == 2
        assert "SCRIPT" in done.stderr

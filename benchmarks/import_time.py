"""What `import synthesizer_jax` costs beside `import flax`: new processes in turn, medians and their ratio.

python benchmarks/import_time.py [PAIRS]
"""

import statistics
import subprocess
import sys

PROGRAM = "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"


def seconds(module: str) -> float:
    """The time that a new process takes to import the module."""
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(module)], capture_output=True, text=True, check=True)
    return float(done.stdout)


def main(pairs: int) -> None:
    measured = [(seconds("flax"), seconds("synthesizer_jax")) for _ in range(pairs + 1)][1:]  # the first warms the disk
    ratios = sorted(ours / flax for flax, ours in measured)
    flax, ours = (statistics.median(times) for times in zip(*measured, strict=True))
    print(f"flax {flax:.3f} s, synthesizer_jax {ours:.3f} s (medians of {pairs})")
    print(f"ratio, pair by pair: median {statistics.median(ratios):.2f}, {ratios[0]:.2f} to {ratios[-1]:.2f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 9)

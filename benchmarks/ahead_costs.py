"""When a drafter on another device pays, ahead of verification or not: closed form, no run.

    python benchmarks/ahead_costs.py [--target 37.0] [--shared 7.7] [--apart 31.0 61.0]

Milliseconds a call: of the target (a block costs what a token does), of the drafter on the target's
device, and of it on another device. The defaults are a 8B in bfloat16 on an M4 Max's GPU with
Qwen3-8B-DFlash-b16: 27.0 tokens/s of the target and its 16.4 GB give 443 GB/s; the drafter and the
head are 3.39 GB in float16. The same machine's Neural Engine ran 3.23 GB of Phi-4-mini in 58.2 ms
(4 rows), so 61 ms in float16 and 31 in INT8.

A drafter ahead guesses that the whole block is accepted, and the token after it. The guess is right
with probability q; then its draft is ready when the target is, and else it is made anew once the
running one has ended. A draft token is right with the same probability p after right ones.
"""

import argparse

BLOCKS = (3, 7, 15)
RIGHT = (0.6, 0.7, 0.8, 0.9, 0.95)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--target", type=float, default=37.0)
    parser.add_argument("--shared", type=float, default=7.7)
    parser.add_argument("--apart", type=float, nargs="+", default=[31.0, 61.0])
    options = parser.parse_args()
    call, shared = options.target, options.shared
    names = [f"{ms:g} ms: {how}" for ms in options.apart for how in ("in turn", "ahead")]
    print(f"tokens/s; plain {1000 / call:.1f}")
    print(" | ".join(["drafts", "p", "q", f"{shared:g} ms, same device", *names]))
    for drafts in BLOCKS:
        for p in RIGHT:
            tokens, q = (1 - p ** (drafts + 1)) / (1 - p), p ** (drafts + 1)
            cells = [f"{1000 * tokens / (call + shared):.1f}"]
            for apart in options.apart:
                waits = max(apart - call, 0.0)
                ahead = call + waits + (1 - q) * apart
                cells += [f"{1000 * tokens / ms:.1f}" for ms in (call + apart, ahead)]
            print(" | ".join([str(drafts), f"{p}", f"{q:.2f}", *cells]))
    for apart in options.apart:
        needed = 1 - (shared - max(apart - call, 0.0)) / apart
        print(f"{apart:g} ms ahead is faster than {shared:g} ms in turn from q = {needed:.2f} on")


if __name__ == "__main__":
    main()

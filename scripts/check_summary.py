"""Hold a demo's summary.json against what the README promises: lossless, and tau >= 2 in every domain over at least 100 rounds."""

from __future__ import annotations

import json
import sys


def main() -> int:
    summary = json.loads(open(sys.argv[1]).read())
    wrong = [] if summary["lossless"] else ["the outputs differ from plain decoding"]
    if summary["walk_agrees"] < 0.95:  # rounding may decide between two equal candidates, no more
        wrong.append(f"decoding took other rounds than the walk on {1 - summary['walk_agrees']:.0%} of the prompts")
    for domain, tau in summary["tau"].items():
        if tau["rounds"] < 100:
            wrong.append(f"{domain}: only {tau['rounds']} rounds")
        if not tau["value"] >= 2.0:
            wrong.append(f"{domain}: tau {tau['value']} is below 2.0")
    print(f"demo: {summary['seconds_after_install']} s after installation; " + ("; ".join(wrong) or "as promised"))
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())

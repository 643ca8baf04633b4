"""The README's commands and tables: `readme.py command NAME` prints a command, `readme.py render` rewrites the tables from tests/records/*.json."""
from __future__ import annotations

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
BEGIN, END = "<!-- records: made by tests/readme.py render -->", "<!-- records end -->"


def command(name: str) -> str:
    """The shell lines of the fenced block that follows `<!-- command: NAME -->`."""
    match = re.search(rf"<!-- command: {re.escape(name)} -->\s*```bash\n(.*?)```", README.read_text(), re.S)
    if match is None:
        raise SystemExit(f"README.md has no command {name!r}")
    return match.group(1).strip()


def tables() -> str:
    """Markdown of every record, in the order of their names."""
    parts = []
    for file in sorted((ROOT / "tests/records").glob("*.json")):
        record = json.loads(file.read_text())
        parts.append(
            f"**{record['device']}** ({record['arch']}; torch {record['torch']}, Triton {record['triton']}; commit {record['commit'][:9]}, {record['date']}; "
            f"`{record['command']}`; [record](tests/records/{file.name}))\n"
        )
        parts.append("| op | implementation | native, against float64 | worst error / derived bound | worst relative L2 (GEMMs: BF16 output) | graph replay with other inputs and lengths | sm_70 PTX through the driver |")
        parts.append("|---|---|---|---|---|---|---|")
        replay = {(r["op"], r["impl"]): r for r in record["graph_replay"]}
        for row in record["native"]:
            key = (row["op"], row["impl"])
            ptx = [r for r in record["sm70_ptx"] if (r["op"], r["impl"]) == key]
            graph = replay.get(key)
            equal = sum(r["bits_equal_native"] for r in ptx)
            parts.append(
                f"| `{row['op']}` | {row['impl']} | {row['passed']}/{row['cases']} cases | {row['worst_error_over_bound']:.3f} | {row['worst_relative_l2']:.1e} | "
                + (f"{graph['passed']}/{graph['cases']} cases | " if graph else "- | ")
                + (f"{sum(r['ok'] for r in ptx)}/{len(ptx)} right, {equal} with the native bits |" if ptx else "- |")
            )
        if record.get("demo"):
            parts += ["", "| SmolLM2-135M, linear layers | KV cache | answer | perplexity (FP16: same text) |", "|---|---|---|---|"]
            for row in record["demo"]:
                text = row["text"].strip().replace("|", "/").replace("\n", " ")
                parts.append(f"| {row['quant']} | {row['kv']} | {text[:80]} | {row['perplexity']:.3f} ({row['perplexity_fp16']:.3f}) |")
        parts.append("")
    return "\n".join(parts).strip()


def rendered() -> str:
    before, rest = README.read_text().split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{tables()}\n{END}{after}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["command"] and len(sys.argv) == 3:
        print(command(sys.argv[2]))
    elif sys.argv[1:] == ["render"]:
        README.write_text(rendered())
    else:
        raise SystemExit(__doc__)

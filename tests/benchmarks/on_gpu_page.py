"""The results of `on_gpu.py` on one page of at most 60 lines, the measured figures beside the expected ones."""

from typing import Any

MOST_LINES = 60
# Of pretrain-350m on an H100, estimated before anything was measured.
EXPECTED = "| expected on an H100, an estimate | 183,000 | 183,000 | 354 (335 to 380) | 28 | 47% | 50.0 | |"
EXPECTED_FP8 = "| expected in FP8 | | +9 to +12% | | | | | |"
BATCH = 512 * 1024  # tokens of a step of pretrain-350m


def page(found: dict[str, Any]) -> str:
    """The page, in Markdown; what does not fit is in the JSON file."""
    machine, parts = found["machine"], found["parts"]
    results = {
        name: one["result"] for part in parts.values() for name, one in part["commands"].items() if one.get("result")
    }
    lines = [
        f"# {found['device']}, {found['date']}",
        f"{machine['gpu'] or 'no GPU'}, {machine['cores']} cores; torch {machine['torch']}, "
        f"Python {machine['python']}; revision {(machine['revision'] or 'unknown')[:12]}",
    ]
    for section in (steps, profile, trainings, peer, probe, kernels):
        try:
            told = section(results)
        except Exception as error:  # results of a command that broke may be incomplete
            told = [f"{section.__name__}: {type(error).__name__}: {error}"]
        lines += ["", *told] if told else []
    shown = MOST_LINES - len(parts) - 3
    if len(lines) > shown:
        lines[shown - 1 :] = [f"({len(lines) - shown + 1} more lines are left out; the JSON file has all)"]
    return "\n".join([*lines, *table_of_parts(parts)])


def verdict(record: dict[str, Any]) -> str:
    """How a command ended, on one line."""
    ended = "done" if record["ok"] else "cut" if record["exit"] == "cut" else f"exit code {record['exit']}"
    said = record.get("said", "")
    return f"{ended} after {record['seconds']:.0f} s" + f": {said[:120]}" * tells(record)


def tells(record: dict[str, Any]) -> bool:
    """Whether the last line of a command's output is worth a look: an error, or what tests say."""
    return not record["ok"] or any(word in record.get("said", "") for word in (" passed", " skipped", " apart"))


def table_of_parts(parts: dict[str, Any]) -> list[str]:
    """Seconds beside expected ones, and what did not end well."""
    lines = ["", "| part | expected s | s | |", "|---|---|---|---|"]
    for name, part in parts.items():
        told = [f"{command}: {verdict(one)}" for command, one in part["commands"].items() if tells(one)]
        said = "; ".join([part["said"]] if "said" in part else told).replace("|", "/")
        lines.append(f"| {name} | {part['expected_s']} | {part.get('seconds', '-')} | {said[:250] or 'done'} |")
    return lines


def steps(results: dict[str, Any]) -> list[str]:
    rows = []
    headline = projected(results.get("headline", {}))
    for name, one in results.items():
        if "ms_per_micro_batch" not in one:
            continue
        rate = projected(one)
        share = f" ({rate / headline - 1:+.1%})" if headline and name != "headline" else ""
        memory = [
            f"{one[key] / 2**30:.1f}" if one.get(key) else "" for key in ("peak_memory_bytes", "predicted_memory_bytes")
        ]
        mfu = one.get("mfu") and one["mfu"] * rate / one["tokens_per_second"]  # of a step of 512Ki tokens, too
        mfu = f"{mfu:.1%}" if mfu and not name.startswith("fp8") else ""  # that of FP8 is of another peak
        rows.append(
            f"| {name} | {one['tokens_per_second']:,.0f} | {rate:,.0f}{share} | {micro_batch_ms(one):.1f} | "
            f"{one['optimizer']['ms_per_step']:.1f} | {mfu} | {' | '.join(memory)} |"
        )
    if not rows:
        return []
    return [
        "| step | tokens/s | of steps of 512Ki (to headline) | ms a micro-batch | ms of the optimizer | MFU | GiB | "
        "GiB of tensors predicted |",
        "|---|---|---|---|---|---|---|---|",
        EXPECTED,
        EXPECTED_FP8,
        *rows,
    ]


def micro_batch_ms(step: dict[str, Any]) -> float:
    """The time of a micro-batch without its share of the optimizer's."""
    return (step["ms_per_step"] - step["optimizer"]["ms_per_step"]) / step["accumulate"]


def projected(step: dict[str, Any]) -> float:
    """Tokens a second of a step, were it one of 512Ki tokens: the optimizer takes as long for any number of tokens."""
    if "ms_per_micro_batch" not in step:
        return 0.0
    optimizer = step["optimizer"]["ms_per_step"]
    return BATCH / (optimizer + (step["ms_per_step"] - optimizer) * BATCH / step["tokens_per_step"]) * 1e3


def profile(results: dict[str, Any]) -> list[str]:
    found = results.get("profile")
    if not found:
        return []
    parts = (f"{name} {part['ms_per_step']:.1f} ms ({part['share']:.1%})" for name, part in found["parts"].items())
    whole = found["kernels_ms_per_step"] or 1
    longest = (
        f"{ms:.1f} ms ({ms / whole:.0%}, {count:.0f}x) `{name[:60]}`"
        for name, (ms, count) in list(found["kernels"].items())[:8]
    )
    return [
        f"Parts of a step of {found['tokens_per_step']:,} tokens: {', '.join(parts)}.",
        f"Kernels, {whole:.0f} ms a step: {'; '.join(longest) or 'none in the trace'}.",
    ]


def probe(results: dict[str, Any]) -> list[str]:
    found = results.get("probe")
    if not found:
        return []
    names = ("allocator", "pinned_memory", "launches", "copies", "big_product", "products_in_place", "attention")
    lines = [f"- {name}: {short(found.get(name))}" for name in names]
    products = found.get("products")
    if not isinstance(products, dict):
        return [*lines, f"- products: {short(products)}"]
    lines += ["", "| TFLOP/s | forward | gradient of the input | gradient of the weight |", "|---|---|---|---|"]
    for name, one in products.items():
        cells = [short(one[kind]) for kind in ("forward", "dx", "dw")] if isinstance(one, dict) else [short(one)]
        lines.append(f"| {' | '.join([name, *cells])} |")
    last = products["down"]
    errors = short(last["errors of dw"]) if isinstance(last, dict) else ""
    return [*lines, "", f"Errors of the gradient of `down`, relative: {errors}"]


def short(value: Any) -> str:
    """A value of the probe."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {short(one)}" for key, one in value.items() if key != "settings")
    return str(value)[:40]


def kernels(results: dict[str, Any]) -> list[str]:
    lines = []
    for name in ("kernels", "kernels-fp16"):
        for case, one in results.get(name, {}).get("cases", {}).items():
            passes = (
                f"{which} {one[which]['ours']['seconds'] * 1e3:.2f} ms"
                + f", {one[which]['ours'].get('of_copy_rate', 0):.0%} of the copy"
                * ("of_copy_rate" in one[which]["ours"])
                + f", eager {one[which]['eager']['seconds'] / one[which]['ours']['seconds']:.1f}x"
                for which in ("forward", "backward", "forward_backward")
                if which in one
            )
            lines.append(f"- {case}: {one.get('unavailable') or '; '.join(passes)}")
    return lines


def peer(results: dict[str, Any]) -> list[str]:
    found = results.get("peer")
    if not found:
        return []
    told = [
        f"{name} {one['tokens_per_second'] or 0:,.0f} tokens/s, {one['peak_bytes'] / 2**30:.1f} GiB"
        for name, one in found["contenders"].items()
    ]
    return [f"Peers: {'; '.join([*told, *(f'{name}: {why[:80]}' for name, why in found['unavailable'].items())])}."]


def trainings(results: dict[str, Any]) -> list[str]:
    told = [f"{name} {one['val/loss']:.4f}" for name, one in results.items() if "val/loss" in one]
    if (apart := results.get("same", {}).get("apart")) is not None:
        told.append(f"killed and resumed, training losses at most {apart} apart from whole")
    return [f"Validation losses: {'; '.join(told)}."] if told else []

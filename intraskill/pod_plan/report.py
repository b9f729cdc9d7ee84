"""A plan in words and tables, as Markdown: what the terminal shows is what docs/plan.md keeps."""

from pathlib import Path

from intraskill.pod_plan.plan import Plan, knob
from intraskill.pod_plan.steps import Step
from intraskill.pod_plan.topology import GIB

_NAMES = {"gradient": "gradient of a microbatch", "log_probs": "log-probs of a microbatch", "apply": "optimizer step", "decode": "decode call"}


def _figure(amount: float) -> str:
    """Three significant digits, or all before the point."""
    return f"{amount:,.0f}" if abs(amount) >= 100 else f"{amount:.3g}"


def _gib(amount: float) -> str:
    return _figure(amount / GIB)


def _milliseconds(amount: float, rate: float | None) -> str:
    return "-" if rate is None else _figure(1e3 * amount / rate)


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _heading(plan: Plan) -> str:
    shape = plan.shape
    how = "calculated by formula, not compiled: no compiler for this machine was at hand" if plan.analytic else "compiled ahead of time"
    settings = " ".join(f"--config.{name}={value}" for name, value in plan.settings.items())
    return (
        f"{plan.topology.num_devices} devices of {_gib(plan.topology.chip.memory_bytes)} GiB; {how}. Model: {plan.source}; {shape.dtype}, "
        f"remat {shape.remat}, {shape.attention} attention, chunks of {shape.chunk_size}, pieces of {shape.piece_length or 'the whole row'}. "
        f"One row of {plan.row_length:,} tokens, {plan.trained:,} of them trained on, a device. "
        f"Settings that follow from the number of devices: `{settings}`."
    )


def _memory_row(plan: Plan, step: Step) -> list[str]:
    most, memory, state = plan.topology.chip.memory_bytes, step.memory, plan.state
    if memory is None:
        return [_NAMES[step.name], "", "", "", "", "", "", f"refused: {step.refused[:300]}"]
    if step.name == "decode":
        parts = ["", "", "", _gib(memory.arguments)]
    else:
        gradient = 0 if step.name == "log_probs" else state.gradient
        rest = memory.arguments + memory.resident - state.parameters - state.optimizer - gradient
        parts = [_gib(state.parameters), _gib(state.optimizer), _gib(gradient), _gib(max(0, rest))]
    return [_NAMES[step.name], *parts, _gib(memory.activations), _gib(memory.peak), f"{memory.peak / most:.1%}"]


def _work_row(plan: Plan, step: Step) -> list[str]:
    chip, done = plan.topology.chip, step.work
    sent = sum(done.exchanged.values())
    return [
        _NAMES[step.name],
        _figure(done.flops / 1e12),
        _figure(done.bytes / 1e9),
        _milliseconds(done.bf16_flops if plan.topology.kind == "tpu" else done.flops, chip.flops),
        _milliseconds(done.bytes, chip.memory_rate),
        ", ".join(f"{kind} {_figure(amount / 1e9)}" for kind, amount in done.exchanged.items()) or "-",
        _milliseconds(sent, chip.link_rate),
    ]


def _ratios(plan: Plan) -> str:
    step = plan.step("gradient")
    if step is None:
        return ""
    on_tpu = plan.topology.kind == "tpu"
    flops, passes = step.work.flops, step.work.bf16_flops if on_tpu else step.work.flops
    checked = "" if plan.analytic else f" Counted in the program / by formula {flops / plan.expected_flops:.3f}."
    taken = ", with float32 products taken as six bfloat16 passes" if on_tpu else ""
    return (
        f"Gradient step: executed / model FLOPs {flops / plan.model_flops:.3f} (model: {_figure(plan.model_flops / 1e12)} TFLOP a device).{checked} "
        f"Model FLOPs utilisation is at most {plan.model_flops / passes:.1%}{taken}.\n\n"
    )


def verdict(plan: Plan) -> str:
    """One line: whether everything fits; where not, the setting that helps."""
    elsewhere = "".join(f" Its engines are elsewhere; on a device of this kind the {_need(plan, step)}." for step in plan.misfits_elsewhere)
    if not plan.misfits:
        peaks = [step.memory.peak for step in plan.compiled if step.memory is not None and step not in plan.misfits_elsewhere]
        return f"{plan.topology.name}: fits, {max(peaks, default=0) / plan.topology.chip.memory_bytes:.1%} of a device's memory at most.{elsewhere}"
    parts = " ".join(f"{_need(plan, step)}." for step in plan.misfits)
    return f"{plan.topology.name}: does NOT fit. {parts}{elsewhere}"


def _need(plan: Plan, step: Step) -> str:
    need = f"needs {_gib(step.memory.peak)} GiB" if step.memory is not None else "was refused by the compiler for its size"
    return f"{_NAMES[step.name]} {need} of {_gib(plan.topology.chip.memory_bytes)} GiB: {knob(plan, step)}"


def text(plan: Plan) -> str:
    """The section of docs/plan.md."""
    columns = ["step", "parameters", "optimizer", "gradient", "batch; decode: parameters and caches", "activations", "peak", "of memory"]
    memory = _table(["GiB on a device: " + columns[0], *columns[1:]], [_memory_row(plan, step) for step in plan.compiled])
    columns = ["TFLOP executed", "GB moved, at least", "ms at peak FLOP/s", "ms at peak memory rate", "GB sent", "ms at peak link rate"]
    done = _table(["on a device: step", *columns], [_work_row(plan, step) for step in plan.compiled])
    return f"## {plan.topology.name}\n\n{_heading(plan)}\n\n{memory}\n\n{done}\n\n{_ratios(plan)}{verdict(plan)}\n"


def write(path: Path, plan: Plan) -> None:
    """Puts the plan into a file in place of an earlier one for the same machine; the file's text before the first plan stays."""
    head, *sections = (path.read_text() if path.exists() else "# Plans\n").split("\n## ")
    kept = {section.partition("\n")[0]: section.rstrip() for section in sections}
    kept[plan.topology.name] = text(plan).removeprefix("## ").rstrip()
    path.write_text("\n\n## ".join([head.rstrip(), *kept.values()]) + "\n")

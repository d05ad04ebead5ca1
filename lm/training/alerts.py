"""Conditions of alerts over logged metrics, such as `loss > 1.5 * median(loss, 100)`, and their evaluation.

Python's parser parses an expression, but Python does not run it: `Expression` refuses every node that is not in the
tables below. An unknown number is NaN and an undecided condition is None: until a metric has a value and a window is
full, and after a division by zero. An undecided condition does not fire.
"""

import ast
import math
import operator
from collections import deque
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from statistics import fmean, median, pstdev
from typing import Any, NoReturn

from lm.errors import RequestError
from lm.runs.metrics import METRICS

MAX_CHARACTERS = 500
MAX_WINDOW = 10_000  # number of values
MAX_NUMBER = 1e300

ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
              ast.Div: lambda a, b: a / b if b else math.nan}  # fmt: skip
COMPARISONS = {ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
               ast.Eq: operator.eq, ast.NotEq: operator.ne}  # fmt: skip
LOGIC = (ast.And, ast.Or, ast.Not)
OPERATORS = {*ARITHMETIC, *COMPARISONS, *LOGIC, ast.USub, type(None)}
WINDOWS = {"mean": fmean, "median": median, "min": min, "max": max, "std": pstdev}
EXAMPLES = {"abs": "abs(lr - 1e-3)", "previous": "previous(loss)"} | {name: f"{name}(loss, 100)" for name in WINDOWS}
ALLOWED = f"allowed are numbers, metrics, + - * /, comparisons, and, or, not and {', '.join(EXAMPLES)}"

# Name of a metric in an expression -> its name in the log.
NAMES = {metric.alert: name for name, metric in METRICS.items() if metric.alert} | {"step": "step"}
LOGGED = {name.replace("/", "_"): metric.alert for name, metric in METRICS.items() if metric.alert}  # a likely mistake
CLOCKS = {"step", "tokens"}  # in every log line: their new values alone do not evaluate an expression


class History:
    """The newest value of each metric, and its last `depths[metric]` finite values before."""

    def __init__(self, depths: Mapping[str, int]) -> None:
        self.newest: dict[str, float] = {}
        self.before = {name: deque[float](maxlen=depth) for name, depth in depths.items()}

    def add(self, values: Mapping[str, float]) -> None:
        """Add new values; metrics that are not kept here are ignored."""
        for name in self.before.keys() & values.keys():
            if math.isfinite(self.newest.get(name, math.nan)):
                self.before[name].append(self.newest[name])
            self.newest[name] = float(values[name])

    def drop_newest(self) -> None:
        """Drop the newest values, so that they do not enter a window."""
        self.newest.clear()

    def state_dict(self) -> dict[str, Any]:
        newest = {name: value for name, value in self.newest.items() if math.isfinite(value)}
        return {"newest": newest, "before": {name: list(values) for name, values in self.before.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.newest = {name: value for name, value in state["newest"].items() if name in self.before}
        for name, values in self.before.items():
            values.clear()
            values.extend(state["before"].get(name, []))


class Expression:
    """A condition over metrics; `depths` has the number of earlier values that it needs of each metric."""

    def __init__(self, text: str) -> None:
        self.text = str(text).strip()
        self.depths: dict[str, int] = {}
        self._figures: dict[str, ast.expr] = {}  # metrics and windows, for `explain`
        self._tree = _parse(self.text)
        self._check(self._tree, condition=True)

    def holds(self, history: History) -> bool | None:
        """Whether the condition is true; None if undecided."""
        return _evaluate(self._tree, history)

    def explain(self, history: History, step: int) -> str:
        """The condition, and the values of its metrics and windows: `loss > 10: loss is 12.31 at step 130`."""
        shown = {text: _evaluate(node, history) for text, node in self._figures.items() if text != "step"}
        figures = ", ".join(f"{text} is {_readable(value)}" for text, value in shown.items())
        return f"{self.text}: {figures}{' ' if figures else ''}at step {step}"

    def _refuse(self, node: ast.AST, reason: str) -> NoReturn:
        part = ast.get_source_segment(self.text, node)
        where = "" if part == self.text else f" at `{part}`"
        raise RequestError(f"expression `{self.text}`{where}: {reason}")

    def _check(self, node: ast.expr, condition: bool) -> None:
        """RequestError if a node or a part of it is not allowed, or a number stands for a condition or vice versa."""
        operators = [getattr(node, "op", None), *getattr(node, "ops", [])]
        parts = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
        match node:
            case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
                if not abs(value) < MAX_NUMBER:
                    self._refuse(node, "larger than any number here can be")
            case ast.Name(id=name):
                self._add_metric(node, name)
            case ast.Call(func=ast.Name(id=name), keywords=[]):
                parts = self._check_call(node, name)
            case ast.BinOp(left=ast.Name(id=group), right=ast.Name(id=name)) if f"{group}/{name}" in NAMES.values():
                self._refuse(node, f"the name of a metric has no group here: write {LOGGED[f'{group}_{name}']}")
            case ast.BinOp() | ast.UnaryOp() | ast.Compare() | ast.BoolOp() if {*map(type, operators)} <= OPERATORS:
                pass
            case _:
                self._refuse(node, f"this may not stand here; {ALLOWED}")
        for part in parts:
            self._check(part, condition=isinstance(operators[0], LOGIC))
        if condition and not _is_condition(node):
            self._refuse(node, "a number, where something true or false is needed: compare it, such as `loss > 10`")
        if not condition and _is_condition(node):
            self._refuse(node, "true or false, where a number is needed; write `and` between two comparisons")

    def _check_call(self, node: ast.Call, name: str) -> list[ast.expr]:
        """The arguments of a call that are to be checked: none for a window over a metric."""
        match name, node.args:
            case "abs", [argument]:
                return [argument]
            case "previous", [ast.Name(id=metric)]:
                count = 1
            case _, [ast.Name(id=metric), ast.Constant(value=int() as count)] if (
                name in WINDOWS and 1 <= count <= MAX_WINDOW and count is not True
            ):
                pass
            case _ if name in EXAMPLES:
                self._refuse(node, f"write it such as {EXAMPLES[name]}; a window has 1 to {MAX_WINDOW:,} values")
            case _:
                self._refuse(node, f"no such function{_nearest(name, EXAMPLES)}; there are {', '.join(EXAMPLES)}")
        self._add_metric(node.args[0], metric, count)
        self._figures[ast.unparse(node)] = node
        return []

    def _add_metric(self, node: ast.expr, name: str, depth: int = 0) -> None:
        if name not in NAMES:
            if name in EXAMPLES:
                self._refuse(node, f"a function, written such as {EXAMPLES[name]}")
            hint = f"; did you mean {LOGGED[name]}?" if name in LOGGED else _nearest(name, NAMES)
            self._refuse(node, f"no such metric{hint}; there are {', '.join(NAMES)}")
        self.depths[name] = max(depth, self.depths.get(name, 0))
        self._figures.setdefault(name, node)


class AlertEvaluator:
    """Evaluates several expressions over one history."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.expressions = [Expression(text) for text in texts]
        names = sorted({name for expression in self.expressions for name in expression.depths})
        self.history = History({name: max(each.depths.get(name, 0) for each in self.expressions) for name in names})

    def evaluate(self, metrics: Mapping[str, float]) -> dict[Expression, bool | None]:
        """Add the metrics of a log line, and evaluate the expressions whose metrics are in the line."""
        values = {name: metrics[tag] for name, tag in NAMES.items() if tag in metrics}
        self.history.add(values)
        measured = {each: each.depths.keys() - CLOCKS or each.depths.keys() for each in self.expressions}
        return {each: each.holds(self.history) for each, names in measured.items() if names & values.keys()}


def _parse(text: str) -> ast.expr:
    if len(text) > MAX_CHARACTERS:
        raise RequestError(f"expression `{text[:40]}...` has {len(text)} characters; at most {MAX_CHARACTERS}")
    if not (text and text.isprintable()):
        raise RequestError(f"expression {text!r}: one line of text is needed, such as `loss > 10`")
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise RequestError(f"expression `{text}`, character {error.offset}: {error.msg}; {ALLOWED}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise RequestError(f"expression `{text}` is nested too deep to be read") from error


def _evaluate(node: ast.expr, history: History) -> Any:
    """The value of a number (a float, NaN: unknown) or of a condition (a bool, None: undecided)."""
    match node:
        case ast.Constant(value=value):
            return float(value)
        case ast.Name(id=name):
            return history.newest.get(name, math.nan)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand, history)
        case ast.UnaryOp(operand=operand):
            value = _evaluate(operand, history)
            return None if value is None else not value
        case ast.BinOp(left=left, op=op, right=right):
            return ARITHMETIC[type(op)](_evaluate(left, history), _evaluate(right, history))
        case ast.Compare(left=left, ops=ops, comparators=others):
            sides = [_evaluate(side, history) for side in (left, *others)]
            return _combine([_compare(*each) for each in zip(sides, ops, sides[1:])], decisive=False)
        case ast.BoolOp(op=op, values=parts):
            return _combine([_evaluate(part, history) for part in parts], decisive=isinstance(op, ast.Or))
        case ast.Call(func=ast.Name(id="abs"), args=[argument]):
            return abs(_evaluate(argument, history))
        case ast.Call(func=ast.Name(id=function), args=[ast.Name(id=name), *rest]):
            values, count = list(history.before[name]), rest[0].value if rest else 1
            return WINDOWS.get(function, max)(values[-count:]) if len(values) >= count else math.nan


def _is_condition(node: ast.expr) -> bool:
    return isinstance(node, ast.Compare | ast.BoolOp) or isinstance(getattr(node, "op", None), ast.Not)


def _compare(left: float, op: ast.cmpop, right: float) -> bool | None:
    return None if math.isnan(left) or math.isnan(right) else COMPARISONS[type(op)](left, right)


def _combine(values: list[bool | None], decisive: bool) -> bool | None:
    """`and` (`decisive` False) or `or` (`decisive` True): a decisive value decides, else an undecided one (None)."""
    return decisive if decisive in values else None if None in values else not decisive


def _readable(value: float) -> str:
    if math.isnan(value):
        return "not known"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"


def _nearest(name: str, names: Iterable[str]) -> str:
    close = get_close_matches(name, list(names), 1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""

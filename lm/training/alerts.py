"""Alerts: conditions of `lm/training/alerts` over what the run log writes, such as `loss > 10` or `val_loss > 4`."""

import ast
import math
import operator
import statistics
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NoReturn

from lm.errors import RequestError
from lm.runs.metrics import METRICS

# ---- expressions -----------------------------------------------------------------------------------------------------
# Conditions over named values and their past, such as `loss > 1.5 * median(loss, 100)`: read once, looked at often.
#
# Python's grammar reads an expression and nothing of Python runs it: what is allowed is in the tables below, and every
# node becomes one of the small functions here. An unknown number is NaN and an undecided condition is None: so it is
# until a metric has a value and a window is full, and after a division by zero. What is undecided does not fire.

LONGEST_TEXT = 500  # characters
DEEPEST = 50  # parts inside parts
LONGEST_WINDOW = 10_000  # values
LARGEST = 1e300

ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
              ast.Div: lambda a, b: a / b if b else math.nan}  # fmt: skip
COMPARISONS = {ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
               ast.Eq: operator.eq, ast.NotEq: operator.ne}  # fmt: skip


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def std(values: list[float]) -> float:
    """The standard deviation of all of the values, not the estimate from a sample."""
    middle = mean(values)
    return math.sqrt(mean([(value - middle) * (value - middle) for value in values]))


WINDOWS = {"mean": mean, "median": statistics.median, "min": min, "max": max, "std": std}
FORMS = {"abs": "abs(lr - 1e-3)", "previous": "previous(loss)"} | {name: f"{name}(loss, 100)" for name in WINDOWS}
ALLOWED = f"allowed are numbers, metrics, + - * /, comparisons, and, or, not and {', '.join(FORMS)}"
NOT_HERE = f"this may not stand here; {ALLOWED}"


class History:
    """The newest value of each name, and the finite ones before it.

    Args:
        depths: names, and how many values before the newest each keeps.
    """

    def __init__(self, depths: Mapping[str, int]) -> None:
        self.newest: dict[str, float] = {}
        self.before = {name: deque[float](maxlen=depth) for name, depth in depths.items()}

    def add(self, values: Mapping[str, float]) -> None:
        """Take the values of a log line; other names than those that are kept are passed over."""
        for name in self.before.keys() & values.keys():
            if math.isfinite(self.newest.get(name, math.nan)):
                self.before[name].append(self.newest[name])
            self.newest[name] = float(values[name])

    def drop_newest(self) -> None:
        """Forget the newest values, so that no window will have them."""
        self.newest.clear()

    def last(self, name: str, count: int) -> list[float] | None:
        """`count` values before the newest; None while there are fewer."""
        values = self.before[name]
        return list(values)[-count:] if len(values) >= count else None

    def state_dict(self) -> dict[str, Any]:
        """What goes on with the run, in finite numbers."""
        newest = {name: value for name, value in self.newest.items() if math.isfinite(value)}
        return {"newest": newest, "before": {name: list(values) for name, values in self.before.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what a checkpoint holds of the names that are kept here."""
        self.newest = {name: value for name, value in state["newest"].items() if name in self.before}
        for name, values in self.before.items():
            values.clear()
            values.extend(state["before"].get(name, []))


Number = Callable[[History], float]  # NaN: not known
Truth = Callable[[History], bool | None]  # None: not decided


@dataclass(frozen=True, eq=False)
class Expression:
    """A condition over metrics. `parse` makes one.

    Attributes:
        text: as it was written.
        depths: the metrics in it, and how many values before the newest are needed of each.
        figures: what a message shows of it: metrics and windows, as they were written.
        holds: whether it is true; None while that is not decided.
    """

    text: str
    depths: dict[str, int]
    figures: dict[str, Number]
    holds: Truth

    def explain(self, history: History, but: Collection[str] = ()) -> str:
        """Its figures, but for some: `loss is 12.31, median(loss, 100) is 3.2`."""
        shown = {text: value(history) for text, value in self.figures.items() if text not in but}
        return ", ".join(f"{text} is {_readable(value)}" for text, value in shown.items())


# ---- reading ---------------------------------------------------------------------------------------------------------


def parse(text: str, names: Collection[str]) -> Expression:
    """Read an expression.

    Args:
        text: the expression.
        names: what may be named in it.

    Raises:
        RequestError: it is not one that may stand here; the message says where, and what may.
    """
    text = str(text).strip()
    if len(text) > LONGEST_TEXT:
        raise RequestError(f"expression `{text[:40]}...` has {len(text)} characters; at most {LONGEST_TEXT}")
    if not (text and text.isprintable()):
        raise RequestError(f"expression {text!r}: one line of text is needed, such as `loss > 10`")
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise RequestError(f"expression `{text}`, character {error.offset}: {error.msg}; {ALLOWED}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise RequestError(f"expression `{text}` is nested too deep to be read") from error
    reader = _Reader(text, names)
    holds = reader.truth(tree, 1)
    if not reader.depths:
        reader.refuse(tree, f"it has no metric in it, so it never changes; there are {', '.join(names)}")
    return Expression(text, reader.depths, reader.figures, holds)


class _Reader:
    """Turns the nodes of one expression into functions."""

    def __init__(self, text: str, names: Collection[str]) -> None:
        self.text, self.names = text, names
        self.depths: dict[str, int] = {}
        self.figures: dict[str, Number] = {}

    def refuse(self, node: ast.AST, reason: str) -> NoReturn:
        piece = ast.get_source_segment(self.text, node)
        where = "" if piece == self.text else f" at `{piece}`"
        raise RequestError(f"expression `{self.text}`{where}: {reason}")

    def truth(self, node: ast.expr, depth: int) -> Truth:
        """A part that is true or false."""
        self._refuse_depth(node, depth)
        if isinstance(node, ast.Compare):
            return self._comparison(node, depth)
        if isinstance(node, ast.BoolOp):
            parts = [self.truth(value, depth + 1) for value in node.values]
            return _all(parts) if isinstance(node.op, ast.And) else _negate(_all([_negate(part) for part in parts]))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return _negate(self.truth(node.operand, depth + 1))
        self.number(node, depth)
        self.refuse(node, "a number, where something true or false is needed: compare it, such as `loss > 10`")

    def number(self, node: ast.expr, depth: int) -> Number:
        """A part that is a number."""
        self._refuse_depth(node, depth)
        match node:
            case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
                if not abs(value) < LARGEST:
                    self.refuse(node, "larger than any number here can be")
                return lambda history: float(value)
            case ast.Name(id=name):
                self._metric(node, name)
                return lambda history: history.newest.get(name, math.nan)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                inner = self.number(operand, depth + 1)
                return lambda history: -inner(history)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
                combine = ARITHMETIC[type(op)]
                a, b = self.number(left, depth + 1), self.number(right, depth + 1)
                return lambda history: combine(a(history), b(history))
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
                return self._call(node, name, arguments, depth)
            case ast.Compare() | ast.BoolOp() | ast.UnaryOp(op=ast.Not()):
                self.refuse(node, "true or false, where a number is needed; write `and` between two comparisons")
        self.refuse(node, NOT_HERE)

    def _refuse_depth(self, node: ast.expr, depth: int) -> None:
        if depth > DEEPEST:
            self.refuse(node, f"more than {DEEPEST} parts inside one another")

    def _metric(self, node: ast.expr, name: str, depth: int = 0) -> None:
        if name not in self.names:
            if name in FORMS:
                self.refuse(node, f"a function, written such as {FORMS[name]}")
            self.refuse(node, f"no such metric{_nearest(name, self.names)}; there are {', '.join(self.names)}")
        self.depths[name] = max(depth, self.depths.get(name, 0))
        self.figures.setdefault(name, lambda history: history.newest.get(name, math.nan))

    def _comparison(self, node: ast.Compare, depth: int) -> Truth:
        compare = [COMPARISONS.get(type(op)) or self.refuse(node, NOT_HERE) for op in node.ops]
        numbers = [self.number(each, depth + 1) for each in (node.left, *node.comparators)]
        return _all([_compared(*each) for each in zip(numbers, compare, numbers[1:])])

    def _call(self, node: ast.Call, name: str, arguments: list[ast.expr], depth: int) -> Number:
        if name not in FORMS:
            self.refuse(node, f"no such function{_nearest(name, FORMS)}; there are {', '.join(FORMS)}")
        match name, arguments:
            case "abs", [argument]:
                inner = self.number(argument, depth + 1)
                return lambda history: abs(inner(history))
            case "previous", [ast.Name(id=metric)]:
                return self._window(arguments[0], metric, 1, max, f"previous({metric})")
            case _, [ast.Name(id=metric), ast.Constant(value=int() as count)] if (
                name in WINDOWS and 1 <= count <= LONGEST_WINDOW and count is not True
            ):
                return self._window(arguments[0], metric, count, WINDOWS[name], f"{name}({metric}, {count})")
        self.refuse(node, f"write it such as {FORMS[name]}; a window has 1 to {LONGEST_WINDOW:,} values")

    def _window(
        self, node: ast.expr, metric: str, count: int, function: Callable[[list[float]], float], label: str
    ) -> Number:
        self._metric(node, metric, count)

        def value(history: History) -> float:
            values = history.last(metric, count)
            return math.nan if values is None else function(values)

        self.figures[label] = value
        return value


def _readable(value: float) -> str:
    if math.isnan(value):
        return "not known"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"


def _nearest(name: str, names: Iterable[str]) -> str:
    close = get_close_matches(name, list(names), 1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def _compared(left: Number, compare: Callable[[float, float], bool], right: Number) -> Truth:
    def holds(history: History) -> bool | None:
        a, b = left(history), right(history)
        return None if math.isnan(a) or math.isnan(b) else compare(a, b)

    return holds


def _all(parts: list[Truth]) -> Truth:
    """False where any is false, else undecided where any is."""

    def holds(history: History) -> bool | None:
        values = [part(history) for part in parts]
        return False if False in values else None if None in values else True

    return holds


def _negate(part: Truth) -> Truth:
    def holds(history: History) -> bool | None:
        value = part(history)
        return None if value is None else not value

    return holds


# ---- alerts ----------------------------------------------------------------------------------------------------------

# As an expression says it -> as the run log does.
NAMES = {metric.alert: name for name, metric in METRICS.items() if metric.alert} | {"step": "step"}
CLOCKS = {"step", "tokens"}  # known at every line, so that they are no reason to look at an expression again


class AlertEvaluator:
    """Expressions over one history.

    Args:
        texts: the expressions.

    Raises:
        RequestError: one of them cannot be read.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self.expressions = [parse(text, NAMES) for text in texts]
        names = {name for expression in self.expressions for name in expression.depths}
        self.history = History(
            {name: max(expression.depths.get(name, 0) for expression in self.expressions) for name in sorted(names)}
        )

    def look(self, metrics: Mapping[str, float]) -> dict[Expression, bool | None]:
        """Take the metrics of a log line, by the log's names, and say which of the expressions they touch hold."""
        values = {name: metrics[tag] for name, tag in NAMES.items() if tag in metrics}
        self.history.add(values)
        return {each: each.holds(self.history) for each in self.expressions if _measured(each) & values.keys()}


def _measured(expression: Expression) -> set[str]:
    """The names whose new values are a reason to look at it."""
    return expression.depths.keys() - CLOCKS or set(expression.depths)

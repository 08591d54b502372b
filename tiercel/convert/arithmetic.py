"""Evaluate the integer arithmetic of shells: `$((16 / n))` and `expr 16 / $n`. Nothing is executed."""

import ast
import operator
import re
from collections.abc import Callable, Mapping

_LONGEST = 200  # characters
_LARGEST = 2**63
_WHOLE = re.compile(r"[+-]?\d+")


def _quotient(a: int, b: int) -> int:
    """Divide and round towards 0, as shells do."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _quotient,
    ast.Mod: lambda a, b: a - b * _quotient(a, b),
}


def evaluated(expression: str, variables: Mapping[str, str]) -> int | None:
    """Evaluate an expression of + - * / %, brackets, integers and names of variables; None for any other expression."""
    if len(expression) > _LONGEST:
        return None
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body, variables)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None
    return value if abs(value) < _LARGEST else None


def _value(node: ast.expr, variables: Mapping[str, str]) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name) and _WHOLE.fullmatch(variables.get(node.id, "")):
        return int(variables[node.id])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, variables)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left, variables), _value(node.right, variables))
    raise ValueError("not arithmetic with whole numbers")

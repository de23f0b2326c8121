"""Rules for functions of corresponding elements.

Where a function has no derivative: `absolute` has 0 at 0; of equal operands of `maximum` and `minimum` each gets half;
`clip` passes on gradients at its limits.
"""

from __future__ import annotations

import math
from typing import Any

from pscluster.spmd.functions.applying import is_scalar, xp
from pscluster.spmd.functions.elementwise import elementwise
from pscluster.spmd.gradients.rules import Application, by_argument, rule, summed_to
from pscluster.spmd.gradients.tape import Node
from pscluster.worker.programs.operations import OPERATIONS

by_argument("negative", lambda at: -at.g)
by_argument("positive", lambda at: at.g)
by_argument("conjugate", lambda at: at.g)
by_argument("real", lambda at: at.g)
by_argument("add", lambda at: at.g, lambda at: at.g)
by_argument("subtract", lambda at: at.g, lambda at: -at.g)
by_argument("multiply", lambda at: at.g * at.b, lambda at: at.g * at.a)
by_argument("divide", lambda at: at.g / at.b, lambda at: -at.g * at.out / at.b)
by_argument("divide_by", lambda at: at.g / at.b)
by_argument("astype", lambda at: at.g)

by_argument("exp", lambda at: at.g * at.out)
by_argument("exp2", lambda at: at.g * at.out * math.log(2))
by_argument("expm1", lambda at: at.g * (at.out + 1))
by_argument("log", lambda at: at.g / at.a)
by_argument("log2", lambda at: at.g / (at.a * math.log(2)))
by_argument("log10", lambda at: at.g / (at.a * math.log(10)))
by_argument("log1p", lambda at: at.g / (at.a + 1))
by_argument("sqrt", lambda at: at.g / (2 * at.out))
by_argument("cbrt", lambda at: at.g / (3 * at.out * at.out))
by_argument("square", lambda at: 2 * at.g * at.a)
by_argument("reciprocal", lambda at: -at.g * at.out * at.out)
by_argument("absolute", lambda at: at.g * xp.sign(at.a))
by_argument("fabs", lambda at: at.g * xp.sign(at.a))

by_argument("sin", lambda at: at.g * xp.cos(at.a))
by_argument("cos", lambda at: -at.g * xp.sin(at.a))
by_argument("tan", lambda at: at.g * (1 + at.out * at.out))
by_argument("arcsin", lambda at: at.g / xp.sqrt(1 - at.a * at.a))
by_argument("arccos", lambda at: -at.g / xp.sqrt(1 - at.a * at.a))
by_argument("arctan", lambda at: at.g / (1 + at.a * at.a))
by_argument("sinh", lambda at: at.g * xp.cosh(at.a))
by_argument("cosh", lambda at: at.g * xp.sinh(at.a))
by_argument("tanh", lambda at: at.g * (1 - at.out * at.out))
by_argument("arcsinh", lambda at: at.g / xp.sqrt(at.a * at.a + 1))
by_argument("arccosh", lambda at: at.g / xp.sqrt(at.a * at.a - 1))
by_argument("arctanh", lambda at: at.g / (1 - at.a * at.a))
by_argument(
    "arctan2",
    lambda at: at.g * at.b / (at.b * at.b + at.a * at.a),
    lambda at: -at.g * at.a / (at.b * at.b + at.a * at.a),
)
by_argument("hypot", lambda at: at.g * (at.a / at.out), lambda at: at.g * (at.b / at.out))
by_argument("logaddexp", lambda at: at.g * xp.exp(at.a - at.out), lambda at: at.g * xp.exp(at.b - at.out))
by_argument("logaddexp2", lambda at: at.g * xp.exp2(at.a - at.out), lambda at: at.g * xp.exp2(at.b - at.out))

for _name in ("deg2rad", "radians"):
    by_argument(_name, lambda at: at.g * (math.pi / 180))
for _name in ("rad2deg", "degrees"):
    by_argument(_name, lambda at: at.g * (180 / math.pi))

by_argument("copysign", lambda at: xp.where(xp.signbit(at.a) == xp.signbit(at.b), at.g, -at.g))
by_argument("remainder", lambda at: at.g, lambda at: -at.g * xp.floor(at.a / at.b))
by_argument("fmod", lambda at: at.g, lambda at: -at.g * xp.trunc(at.a / at.b))
by_argument("ldexp", lambda at: xp.ldexp(at.g, at.b))
by_argument("nan_to_num", lambda at: xp.where(xp.isfinite(at.a), at.g, 0))
by_argument(
    "where",
    None,  # of the condition
    lambda at: xp.where(at.a, at.g, 0),
    lambda at: xp.where(at.a, 0, at.g),
)


def _of_sinc(at: Application) -> Any:
    is_zero = at.a == 0
    return at.g * xp.where(is_zero, 0, (xp.cos(math.pi * at.a) - at.out) / xp.where(is_zero, 1, at.a))


by_argument("sinc", _of_sinc)


def _of_base(at: Application) -> Any:
    if is_scalar(at.b):
        return at.g * 0 if at.b == 0 else at.g if at.b == 1 else at.g * (at.b * at.a ** (at.b - 1))
    return at.g * xp.where(at.b == 0, 0, at.b * at.a ** xp.where(at.b == 0, 1, at.b - 1))


def _of_exponent(at: Application) -> Any:
    if is_scalar(at.a):
        return at.g * at.out * (math.log(at.a) if at.a > 0 else 0.0 if at.a == 0 else math.nan)
    return at.g * at.out * xp.log(xp.where(at.a == 0, 1, at.a))


for _name in ("power", "float_power"):
    by_argument(_name, _of_base, _of_exponent)


def _taken(g: Any, out: Any, own: Any, other: Any) -> Any:
    """Return the gradient where an operand is the result, half of it where both are, and 0 elsewhere."""
    return elementwise("taken", OPERATIONS["taken"], [g, out, own, other])


for _name in ("maximum", "minimum", "fmax", "fmin"):
    by_argument(_name, lambda at: _taken(at.g, at.out, at.a, at.b), lambda at: _taken(at.g, at.out, at.b, at.a))


@rule("taken")
def _of_taken(node: Node, position: int, g: Any) -> Any:
    """Return a gradient's own gradient: linear in the first operand, and constant between jumps in the others."""
    return summed_to(_taken(g, *node.values[1:]), node.operands[0].shape) if not position else None


def _within(at: Application) -> Any:
    g = at.g
    for limit, is_beyond in ((at.b, xp.less), (at.c, xp.greater)):
        if limit is not None:
            g = xp.where(is_beyond(at.a, limit), 0, g)
    return g


def _of_low(at: Application) -> Any:
    g = xp.where(at.a < at.b, at.g, 0)
    return g if at.c is None else xp.where(at.b > at.c, 0, g)  # the upper limit wins


def _of_high(at: Application) -> Any:
    return xp.where((at.a if at.b is None else xp.maximum(at.a, at.b)) > at.c, at.g, 0)


by_argument("clip", _within, _of_low, _of_high)

"""The ways in which transformers' models rotate q and k, and normalise heads, by the source of their functions."""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache, lru_cache
from types import CodeType
from typing import Any, NamedTuple

ROTATE = "apply_rotary_pos_emb"


class Rotation(NamedTuple):
    """How a function rotates q and k by cos and sin [b, n, r]."""

    interleaved: bool = False
    """Pairs of channels 2i and 2i + 1, not i and i + r / 2."""
    whole: bool = True
    """All channels of a head are rotated, not the first of them."""
    columns: str = "all"
    """Of cos: "all" has an angle for each channel; "half": one for each pair; "first half": so has its first half."""
    rounds_last: bool = False
    """The result has the type of q and k, whatever that of cos."""


class Norm(NamedTuple):
    """An RMS norm over the last dimension."""

    plus_one: bool
    epsilon: str
    """The attribute that has it."""


_UNSQUEEZED = "cos = cos.unsqueeze(unsqueeze_dim)\nsin = sin.unsqueeze(unsqueeze_dim)\n"
_FIRST_HALF = (
    "cos = cos[..., :cos.shape[-1] // 2].repeat_interleave(2, dim=-1)\n"
    "sin = sin[..., :sin.shape[-1] // 2].repeat_interleave(2, dim=-1)\n"
)
_WHOLE = "q_embed = q * cos + rotate_half(q) * sin\nk_embed = k * cos + rotate_half(k) * sin\n"
_IN_FLOAT = (
    "q_embed = q.float() * cos + rotate_half(q).float() * sin\n"
    "k_embed = k.float() * cos + rotate_half(k).float() * sin\n"
)
_IN_FLOAT_BEFORE = _IN_FLOAT.replace("(q).float()", "(q.float())").replace("(k).float()", "(k.float())")
_SPLIT = (
    "rotary_dim = cos.shape[-1]\nq_rot, q_pass = (q[..., :rotary_dim], q[..., rotary_dim:])\n"
    "k_rot, k_pass = (k[..., :rotary_dim], k[..., rotary_dim:])\n"
)
_PART = (
    _SPLIT + "q_embed = q_rot * cos + rotate_half(q_rot) * sin\nk_embed = k_rot * cos + rotate_half(k_rot) * sin\n"
    "q_embed = torch.cat([q_embed, q_pass], dim=-1)\nk_embed = torch.cat([k_embed, k_pass], dim=-1)\n"
)
_RETURN = "return (q_embed, k_embed)"
_RETURN_TYPED = "return (q_embed.to(original_dtype), k_embed.to(original_dtype))"
_ORIGINAL = "original_dtype = q.dtype\n"
_HALVES = "x1 = x[..., :x.shape[-1] // 2]\nx2 = x[..., x.shape[-1] // 2:]\nreturn torch.cat((-x2, x1), dim=-1)"
_PAIRS = "x1 = x[..., 0::2]\nx2 = x[..., 1::2]\nreturn torch.stack((-x2, x1), dim=-1).flatten(-2)"
_PAIRS_TOO = "x1 = x[..., ::2]\nx2 = x[..., 1::2]\nrot_x = torch.stack([-x2, x1], dim=-1).flatten(-2)\nreturn rot_x"
_CHUNKS = (
    "first_half, second_half = torch.chunk(x, 2, dim=-1)\nfirst_ = first_half * cos - second_half * sin\n"
    "second_ = second_half * cos + first_half * sin\nreturn torch.cat((first_, second_), dim=-1)"
)
_ARGUMENTS = ["q", "k", "cos", "sin", "unsqueeze_dim"]  # the last one is 1
# The statements of apply_rotary_pos_emb, and those of the function that it calls.
_ROTATIONS = {
    (_UNSQUEEZED + _WHOLE + _RETURN, _HALVES): Rotation(),  # Llama, Mistral, Qwen, Gemma, ...
    (_UNSQUEEZED + _WHOLE + _RETURN, _PAIRS_TOO): Rotation(interleaved=True),  # BLT
    (_UNSQUEEZED + _PART + _RETURN, _HALVES): Rotation(whole=False),  # GPT-NeoX, Qwen3-Next, ...
    (  # Phi-3
        _UNSQUEEZED + _SPLIT + "q_embed = torch.cat([q_rot * cos + rotate_half(q_rot) * sin, q_pass], dim=-1)\n"
        "k_embed = torch.cat([k_rot * cos + rotate_half(k_rot) * sin, k_pass], dim=-1)\n" + _RETURN,
        _HALVES,
    ): Rotation(whole=False),
    (  # Nemotron
        _UNSQUEEZED + "rot_dim = cos.shape[-1]\nq, q_pass = (q[..., :rot_dim], q[..., rot_dim:])\n"
        "k, k_pass = (k[..., :rot_dim], k[..., rot_dim:])\n" + _WHOLE
        + "return (torch.cat((q_embed, q_pass), dim=-1), torch.cat((k_embed, k_pass), dim=-1))",
        _HALVES,
    ): Rotation(whole=False),
    (  # OLMo
        "q_type, k_type = (q.dtype, k.dtype)\n" + _UNSQUEEZED + _WHOLE
        + "return (q_embed.to(q_type), k_embed.to(k_type))",
        _HALVES,
    ): Rotation(rounds_last=True),
    (_ORIGINAL + _UNSQUEEZED + _IN_FLOAT + _RETURN_TYPED, _HALVES): Rotation(rounds_last=True),  # ERNIE 4.5 VL
    (_ORIGINAL + _UNSQUEEZED + _IN_FLOAT_BEFORE + _RETURN_TYPED, _HALVES): Rotation(rounds_last=True),  # ModernBERT
    (  # Cohere
        "dtype = q.dtype\nq = q.float()\nk = k.float()\n" + _UNSQUEEZED + _WHOLE
        + "return (q_embed.to(dtype=dtype), k_embed.to(dtype=dtype))",
        _PAIRS_TOO,
    ): Rotation(interleaved=True, rounds_last=True),
    (  # ERNIE 4.5
        _ORIGINAL + _UNSQUEEZED + _FIRST_HALF + _IN_FLOAT + _RETURN_TYPED,
        _PAIRS,
    ): Rotation(True, True, "first half", True),
    (_UNSQUEEZED + _FIRST_HALF + _WHOLE + _RETURN, _PAIRS): Rotation(True, True, "first half"),  # Helium
    (_UNSQUEEZED + _FIRST_HALF + _PART + _RETURN, _PAIRS): Rotation(True, False, "first half"),  # GLM
    (  # GPT-OSS
        _UNSQUEEZED + "q_embed = rotate_half(q, cos, sin)\nk_embed = rotate_half(k, cos, sin)\n" + _RETURN,
        _CHUNKS,
    ): Rotation(columns="half"),
}
_NORM = (
    "input_dtype = hidden_states.dtype\nhidden_states = hidden_states.to(torch.float32)\n"
    "variance = hidden_states.pow(2).mean(-1, keepdim=True)\n"
    "hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)\n"
)
_NORM_OF_X = (
    "output = self._norm(x.float())\n{}return output.type_as(x)\n"
    "return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)"
)
# The statements of forward(), and of _norm() where that is called.
_NORMS = {
    _NORM + "return self.weight * hidden_states.to(input_dtype)": Norm(False, "variance_epsilon"),
    _NORM + "return (self.weight * hidden_states).to(input_dtype)": Norm(False, "variance_epsilon"),
    _NORM + "return (self.weight.to(torch.float32) * hidden_states).to(input_dtype)": Norm(False, "variance_epsilon"),
    _NORM_OF_X.format("output = output * self.weight.float()\n"): Norm(False, "eps"),
    _NORM_OF_X.format("output = output * (1.0 + self.weight.float())\n"): Norm(True, "eps"),
}


@cache
def written(text: str) -> str:
    """Code as this version of Python writes it: they differ in brackets."""
    return ast.unparse(ast.parse(text))


def definition(function: Any) -> ast.FunctionDef:
    """Raises OSError, TypeError or SyntaxError where the source is not there or is not all that runs, and ValueError
    where the file is not what runs: it may be newer."""
    if hasattr(function, "__wrapped__"):
        raise TypeError
    lines, _ = inspect.findsource(function)
    if getattr(function, "__code__", None) not in _codes("".join(lines)):
        raise ValueError
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    if not isinstance(definition, ast.FunctionDef):
        raise TypeError
    return definition


@lru_cache(maxsize=4)
def _codes(source: str) -> set[CodeType]:
    """The code of all functions of a file. Only the whole file gives it: calls of imported modules have other
    instructions than other calls."""
    found: set[CodeType] = set()
    todo = [compile(source, "<source>", "exec", dont_inherit=True)]
    while todo:
        code = todo.pop()
        found.add(code)
        todo += [x for x in code.co_consts if isinstance(x, CodeType)]
    return found


def _text(definition: ast.FunctionDef) -> str:
    """Its statements, without a docstring."""
    body = [x for x in definition.body if not (isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant))]
    return "\n".join(map(ast.unparse, body))


def _function(given: Any) -> Any:
    """The function that a module of the package `kernels` calls; anything else as it is."""
    forward = getattr(type(given), "forward", None)
    if forward is None or _text(definition(forward)) != "return func(*args, **kwargs)":
        return given
    return inspect.getclosurevars(forward).nonlocals["func"]


def rotation_of(variables: dict[str, Any]) -> Rotation | None:
    """How a module's apply_rotary_pos_emb rotates; None if that is no way that is known."""
    try:
        rotate = definition(_function(variables[ROTATE]))
        if [x.arg for x in rotate.args.args] != _ARGUMENTS or [ast.unparse(x) for x in rotate.args.defaults] != ["1"]:
            return None
        calls = (x for statement in rotate.body for x in ast.walk(statement) if isinstance(x, ast.Call))
        (helper,) = {x.func.id for x in calls if isinstance(x.func, ast.Name)}
        found = _text(rotate).replace(helper + "(", "rotate_half("), _text(definition(variables[helper]))
        return next((rotation for known, rotation in _ROTATIONS.items() if tuple(map(written, known)) == found), None)
    except (KeyError, OSError, TypeError, SyntaxError, ValueError):
        return None


@cache
def norm_of(kind: Any, forward: Any) -> Norm | None:
    """The RMS norm that a class of modules computes by its forward; None for other modules."""
    try:
        found = _text(definition(forward))
        found += "\n" + _text(definition(kind._norm)) if "self._norm(" in found else ""
        return next((norm for known, norm in _NORMS.items() if written(known) == found), None)
    except (AttributeError, OSError, TypeError, SyntaxError, ValueError):
        return None

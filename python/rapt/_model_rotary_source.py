"""A forward of transformers' layers with one call for norms, rotary embedding and the append, made from its source.

A forward is known if it has two statements of this form, and none between them uses the keys, the values or the cache:

    query, key = apply_rotary_pos_emb(query, key, cos, sin)
    if cache is not None:
        key, value = cache.update(key, value, self.layer_idx)

rewritten() makes the same function with one call in their place. The norms of q and k before them move into the call.
All other code is kept, with its line numbers, for tracebacks and debuggers.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import update_wrapper
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from rapt._model_rotary_forms import ROTATE, definition, rotation_of, written

_NAME = "self.config._attn_implementation"
_HEADS_FIRST = ".transpose(1, 2)"


class _RotarySteps(NamedTuple):
    """Where a body rotates and where it appends, and the names that it has for tensors."""

    rotates: int
    appends: int
    query: str
    key: str
    value: str
    cos: str
    sin: str
    cache: str


def _names_in(node: ast.AST) -> set[str]:
    return {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}


def _is(text: str, statement: ast.AST) -> bool:
    return written(text) == ast.unparse(statement)


def _steps_of(body: list[ast.stmt]) -> _RotarySteps | None:
    rotating = [(i, names) for i, names in enumerate(map(_rotated, body)) if names]
    if len(rotating) != 1:
        return None
    ((i, (query, key, cos, sin)),) = rotating
    for j in range(i + 1, len(body)):
        value, kept = _appended(body[j], key)
        if kept:
            first, moves = body[i], {key, value, kept}
            seen = set().union(*map(_names_in, body[i + 1 : j])) & moves
            if isinstance(first, ast.If):  # its condition, and what comes before the rotation
                seen |= set().union(*map(_names_in, (first.test, *first.body[:-1]))) & (moves | {query})
            return None if seen else _RotarySteps(i, j, query, key, value, cos, sin, kept)
        if key in _names_in(body[j]):
            return None
    return None


def _rotated(statement: ast.stmt) -> tuple[str, ...]:
    """query, key, cos and sin of a statement that rotates, also as the last one under a condition."""
    if isinstance(statement, ast.If) and not statement.orelse:
        statement = statement.body[-1]
    names = tuple(getattr(x, "id", "") for x in getattr(getattr(statement, "value", None), "args", ()))
    if len(names) != 4 or not all(names):
        return ()
    return names if _is("{0}, {1} = {4}({0}, {1}, {2}, {3})".format(*names, ROTATE), statement) else ()


def _appended(statement: ast.stmt, key: str) -> tuple[str, str]:
    """The names of the values and the cache of a statement that appends these keys."""
    if not isinstance(statement, ast.If) or not isinstance(statement.test, ast.Compare):
        return "", ""
    kept = getattr(statement.test.left, "id", "")
    names = [getattr(x, "id", "") for x in getattr(getattr(statement.body[0], "value", None), "args", ())]
    if not kept or len(names) != 3 or not names[1]:
        return "", ""
    known = f"if {kept} is not None:\n    {key}, {names[1]} = {kept}.update({key}, {names[1]}, self.layer_idx)"
    return (names[1], kept) if _is(known, statement) else ("", "")


def _changes_in_place(statement: ast.stmt) -> bool:
    for x in ast.walk(statement):
        if isinstance(x, ast.AugAssign) or (isinstance(x, ast.Subscript) and isinstance(x.ctx, ast.Store)):
            return True
        if isinstance(x, ast.Call) and isinstance(x.func, ast.Attribute) and x.func.attr.endswith("_"):
            return True
    return False


def _defer(body: list[ast.stmt], end: int, name: str, variable: str) -> bool | None:
    """Moves the call of a module out of the last statement that makes `name` before body[end]. A variable gets the
    module. Returns whether tokens and heads change places after the call, None if there is no such call."""
    moved = False
    for i in reversed(range(end)):
        within, at, statement = body, i, body[i]
        if _changes_in_place(statement):
            return None
        if name not in _names_in(statement):
            continue
        if isinstance(statement, ast.If) and not statement.orelse and name not in _names_in(statement.test):
            within = statement.body
            (at, statement), *more = [(k, x) for k, x in enumerate(within) if name in _names_in(x)]
            if more:
                return None
        if not isinstance(statement, ast.Assign) or [ast.unparse(x) for x in statement.targets] != [name]:
            return None
        made = statement.value
        if within is body and ast.unparse(made) == name + _HEADS_FIRST:
            moved = True
            continue
        holder: Any = statement
        if not isinstance(made, ast.Call) or not isinstance(made.func, ast.Attribute):
            return None
        if ast.unparse(made).endswith(_HEADS_FIRST):
            holder, made, moved = made.func, made.func.value, True
        if not isinstance(made, ast.Call) or not isinstance(made.func, ast.Attribute):
            return None
        if ast.unparse(made.func.value) != "self":
            return None
        if len(made.args) != 1 or made.keywords or isinstance(made.args[0], ast.Starred):
            return None
        holder.value = made.args[0]
        kept = ast.Assign([ast.Name(variable, ast.Store())], made.func)
        within.insert(at, ast.copy_location(kept, statement))
        return moved
    return None


class _OneName(ast.NodeTransformer):
    """Asks once which attention the config names: that takes as long as a small tensor operation."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if ast.unparse(node) != _NAME:
            return self.generic_visit(node)
        return ast.copy_location(ast.Name("rapt_name", ast.Load()), node)


def _statements(text: str, like: ast.AST | None = None) -> list[ast.stmt]:
    """Of a text, at the place of another statement."""
    tree = ast.parse(text)
    if like is not None:
        for node in ast.walk(tree):
            ast.copy_location(node, like)
    return tree.body


def rewritten(
    theirs: FunctionType, names: set[str], intercepted: Callable[[], bool], step: Callable[..., Any]
) -> FunctionType | str:
    """A layer's forward that normalises, rotates and appends in one call, or the reason why there is none.

    If the config's attention has none of the names, or intercepted() is true, it calls theirs. Else the call is
    step(rotation, theirs, moved)(query, key, value, cos, sin, cache, layer_idx, query_norm, key_norm). cos and sin are
    None if the forward's condition for rotating is false. Norms are modules or None. `moved` says of each of the two
    norms whether tokens and heads change places after it.
    """
    if theirs.__closure__:
        return "its forward is a closure"
    rotation = rotation_of(theirs.__globals__)
    if rotation is None:
        return "it rotates in another way"
    try:
        forward = definition(theirs)
    except (OSError, TypeError, SyntaxError):
        return "the source of its forward is not there"
    except ValueError:
        return "its source has changed"
    forward.decorator_list, forward.returns = [], None
    forward.args.defaults, forward.args.kw_defaults = [], [None] * len(forward.args.kwonlyargs)
    for argument in ast.walk(forward.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    ast.increment_lineno(forward, theirs.__code__.co_firstlineno - 1)
    steps = _steps_of(forward.body)
    if steps is None or _NAME not in ast.unparse(forward):
        return "it does not append what it has rotated"
    moved = _call_once(forward, steps)
    variables: dict[str, Any] = {"rapt_names": names, "rapt_intercepted": intercepted, "rapt_theirs": theirs}
    variables["rapt_step"] = step(rotation, theirs, moved)
    made: dict[str, Any] = {}
    exec(_compiled(forward, theirs, list(variables)), theirs.__globals__, made)
    function: FunctionType = made["rapt_make"](**variables)
    function.__defaults__, function.__kwdefaults__ = theirs.__defaults__, theirs.__kwdefaults__
    update_wrapper(function, theirs)
    return function


def _call_once(forward: ast.FunctionDef, steps: _RotarySteps) -> tuple[bool, bool]:
    """Puts the call into a forward. Returns `moved` of rewritten()."""
    body, old = forward.body, forward.body[steps.rotates]
    call = "{0}, {1}, {2} = rapt_step({0}, {1}, {2}, {3}, {4}, {5}, self.layer_idx, rapt_q_norm, rapt_k_norm)"
    tensors = (steps.query, steps.key, steps.value)
    new = _statements(call.format(*tensors, steps.cos, steps.sin, steps.cache), body[steps.appends])
    if isinstance(old, ast.If):
        old.body[-1:] = new
        old.orelse = _statements(call.format(*tensors, None, None, steps.cache), body[steps.appends])
        new = [old]
    del body[steps.appends]
    body[steps.rotates : steps.rotates + 1] = new
    q_moved = _defer(body, body.index(new[0]), steps.query, "rapt_q_norm")
    k_moved = _defer(body, body.index(new[0]), steps.key, "rapt_k_norm")
    given = [x.arg for x in (*forward.args.posonlyargs, *forward.args.args)]
    given += [f"*{forward.args.vararg.arg}"] if forward.args.vararg else []
    given += [f"{x.arg}={x.arg}" for x in forward.args.kwonlyargs]
    given += [f"**{forward.args.kwarg.arg}"] if forward.args.kwarg else []
    _OneName().visit(forward)
    begin = f"rapt_name = {_NAME}\nif rapt_name not in rapt_names or rapt_intercepted():\n"
    begin += f"    return rapt_theirs({', '.join(given)})\nrapt_q_norm = rapt_k_norm = None"
    body[:0] = _statements(begin, body[0])
    return bool(q_moved), bool(k_moved)


def _compiled(forward: ast.FunctionDef, theirs: FunctionType, variables: list[str]) -> CodeType:
    """Code that defines rapt_make(*variables), which makes the function."""
    (make,) = _statements(f"def rapt_make({', '.join(variables)}):\n    return {forward.name}")
    assert isinstance(make, ast.FunctionDef)
    make.body.insert(0, forward)
    module = ast.fix_missing_locations(ast.Module([make], []))
    return compile(module, theirs.__code__.co_filename, "exec", dont_inherit=True)

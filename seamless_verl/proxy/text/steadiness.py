"""Finds chat templates that rewrite earlier turns, before any request: such conversations become a row per turn.

Tiny conversations are continued as real ones are: a plain one, one with a system message, one with a tool.
"""

from __future__ import annotations

from collections.abc import Sequence

from seamless_verl.proxy.text.chat_template import RenderingFailed, TokenizerRenderer
from seamless_verl.trajectory.matching import ExtensionRefused
from seamless_verl.trajectory.messages import Message, Role

_QUESTION, _ANSWER = Message(role=Role.USER, content="?"), Message(role=Role.ASSISTANT, content="?")
_NEXT = Message(role=Role.USER, content="and then?")  # templates look for the last question by its text
_SYSTEM = Message(role=Role.SYSTEM, content="?")
_TOOL = '{"type": "function", "function": {"name": "f", "description": "f", "parameters": {"type": "object"}}}'
_TRIED: tuple[tuple[str, list[Message], Sequence[str]], ...] = (
    ("with a system message", [_SYSTEM, _QUESTION], ()),
    ("with tools", [_QUESTION], (_TOOL,)),
)


def moving_note(renderer: TokenizerRenderer) -> str:
    """One line about conversations that the template writes anew with every turn; empty where there are none."""
    if _moves(renderer, [_QUESTION], ()):
        which = "every conversation"
    elif moved := [what for what, asked, tools in _TRIED if _moves(renderer, asked, tools)]:
        which = f"conversations {' or '.join(moved)}"
    else:
        return ""
    return (
        f"the model's chat template writes {which} anew with every turn: each turn will be a fork (template_mismatch) "
        "and a row of its own. To have one row, use a chat template that leaves earlier turns as they were"
    )


def _moves(renderer: TokenizerRenderer, asked: list[Message], tools: Sequence[str]) -> bool:
    """Whether the template rewrites earlier turns; no, if it refuses the conversation, as it will an agent's."""
    try:
        known = [*renderer.render_initial(asked, tools), *renderer.encode(_ANSWER.content)]
        renderer.render_extension([*asked, _ANSWER], [_NEXT], tools, known)
    except RenderingFailed:
        return False
    except ExtensionRefused as error:
        return not isinstance(error.__cause__, RenderingFailed)
    return False

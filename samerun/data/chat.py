"""Conversations: what a chat template makes of messages, and which of it is learned."""

import functools
import itertools
import json
from typing import Any

import jinja2
import numpy as np
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from transformers.utils.chat_template_utils import render_jinja_template

from samerun.data.documents import TOOLS
from samerun.data.encode import Encoder, common_length
from samerun.data.order import running_sum
from samerun.errors import UserError

# The roles of chat templates, and what they are called in ShareGPT's messages of from and value.
ROLES = {"human": "user", "gpt": "assistant", "function": "tool"}
ROLES |= {role: role for role in ("user", "assistant", "system", "tool")}

THOUGHTS = "reasoning_content", "reasoning", "thinking"  # The keys of a message by which programs name them.
INSTEAD_OF_CONTENT = "tool_calls", *THOUGHTS  # What an assistant's turn may have.
WEIGHTS = "train", "weight"  # The keys that say whether a message is learned.


def tokenize_chat(batch: dict, numbers: list[int], columns: list[str], encoder: Encoder, train_on: str) -> dict:
    """The rows of tokenize_conversation(). `numbers` are those of the documents, one of which a LookupError names."""
    rows = {"input_ids": [], "labels": []}
    tools = batch.get(TOOLS) or [None] * len(numbers)
    messages = [batch[name] for name in columns if name != TOOLS]
    for number, own_tools, *parts in zip(numbers, tools, *messages):
        try:
            ids, labels = tokenize_conversation(parts, own_tools, encoder, train_on)
        except Exception as error:  # A chat template may refuse a conversation.
            is_ours = isinstance(error, UserError) or type(error) is ValueError  # Nearly all of these.
            kind = "" if is_ours else f"{type(error).__name__}: "
            raise LookupError(number, f"{kind}{error}") from error
        rows["input_ids"].append(ids)
        rows["labels"].append(labels)
    return rows


def tokenize_conversation(parts: list, tools: Any, encoder: Encoder, train_on: str) -> tuple[list[int], list[int]]:
    """Token ids of a conversation, and labels that are -100 except for what the assistant says.

    `parts` are its messages, or those of a prompt and of its completion. Of these, only what the assistant says in the
    completion is learned.
    """
    schemas, turns = tools_of(tools), turns_of(parts[0])
    completion = turns_of(parts[1], role="assistant") if len(parts) == 2 else []
    ids, is_learned = tokenize_turns(turns + completion, encoder, schemas, train_on)
    labels = [token if learned else -100 for token, learned in zip(ids, is_learned)]
    if len(parts) == 1:
        return ids, labels
    if not turns:
        raise ValueError("its prompt has no messages")
    text, _ = render([without_keys(turn, *WEIGHTS) for turn in turns], encoder, schemas)
    prompt, _, _ = encoder.conversation(text)
    start = common_length(ids, prompt)
    if start < len(prompt) - 1:  # Some templates leave out the thinking of earlier turns.
        raise ValueError("the chat template changes the prompt if more follows; end it with the user")
    return ids, [-100] * start + labels[start:]


def tokenize_turns(
    turns: list[dict[str, Any]], encoder: Encoder, tools: list[dict] | None = None, train_on: str = "all"
) -> tuple[list[int], np.ndarray]:
    """Token ids of a conversation, and which of them have a character of what the assistant says and is to learn.

    apply_chat_template() tells the latter, too. But if the last character of a turn has no token of its own, such as a
    space that the tokenizer leaves out, then it takes the rest of the conversation for the assistant's.
    """
    if not turns:
        raise ValueError("it has no messages")
    speaks = [number for number, turn in enumerate(turns) if turn["role"] == "assistant"]
    learned = [number for number in speaks if is_to_learn(turns[number])]
    if train_on == "last":
        learned = [number for number in learned if number == speaks[-1]]
    turns = [without_keys(turn, *WEIGHTS) for turn in turns]
    text, spans = find_spans(turns, speaks, learned, encoder, tools)
    check_written(text, turns, encoder, tools)
    is_said = np.zeros(len(text), bool)
    for begin, end in spans:
        is_said[begin:end] = True
    said_before = running_sum(is_said)
    ids, begins, ends = encoder.conversation(text)
    return ids, said_before[begins] < said_before[ends]


def check_written(text: str, turns: list[dict[str, Any]], encoder: Encoder, tools: list[dict] | None) -> None:
    """Raises ValueError if the text lacks the content of a message, or is the same without tools, calls or thoughts.

    Some templates know no tools or thoughts. Many leave out a message whose role they do not know.
    """
    unwritten = unwritten_message(text, turns, encoder, tools)
    if tools and rendered(turns, encoder) == text:
        unwritten.append("tools")
    if any(turn.get("tool_calls") for turn in turns):
        silent = [without_keys(turn, "tool_calls") for turn in turns]
        if rendered(silent, encoder, tools) == text:
            unwritten.append("tool_calls")
    unwritten += unwritten_thoughts(turns, encoder, tools)
    if unwritten:
        what = " and ".join(unwritten)
        raise ValueError(f"the chat template does not write {what}; name another in data.chat_template")


def unwritten_message(text: str, turns: list[dict[str, Any]], encoder: Encoder, tools: list[dict] | None) -> list[str]:
    """The first message whose content the template leaves out, if any. Of one that calls a tool, many write no more."""
    contents, end = [(turn.get("content") or "").strip() for turn in turns], 0
    for turn, said in zip(turns, contents):
        begin = text.find(said, end)
        if begin < 0 or turn["role"] not in ROLES.values():
            break  # Perhaps one before it is left out, and was found in what this one says.
        end = begin + len(said)
    else:  # Then they need not be rendered again.
        return []
    for number, (turn, said) in enumerate(zip(turns, contents)):
        if not said or any(turn.get(name) for name in INSTEAD_OF_CONTENT):
            continue
        if rendered([*turns[:number], turn | {"content": f".{said}."}, *turns[number + 1 :]], encoder, tools) == text:
            return [f"message {number}, counted from 0, whose role is {turn['role']!r}"]
    return []


def unwritten_thoughts(turns: list[dict[str, Any]], encoder: Encoder, tools: list[dict] | None) -> list[str]:
    """By which names the last turn with thoughts has them, if the template does not write them even at the end."""
    numbers = [number for number, turn in enumerate(turns) if any(turn.get(name) for name in THOUGHTS)]
    if not numbers:
        return []
    *before, last = turns[: numbers[-1] + 1]
    text = rendered([*before, last], encoder, tools)
    if text is None or text != rendered([*before, without_keys(last, *THOUGHTS)], encoder, tools):
        return []
    return [name for name in THOUGHTS if last.get(name)]


def without_keys(turn: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: part for name, part in turn.items() if name not in names}


def is_to_learn(turn: dict[str, Any]) -> bool:
    """What its keys train and weight say, if there are any. One of them is enough to leave it out."""
    weights = [turn[name] for name in WEIGHTS if name in turn]
    for weight in weights:
        if weight not in (0, 1):
            raise ValueError(f"a message has the weight {weight!r}; 0 leaves it out of the loss, and 1 does not")
    return all(weights)


def find_spans(
    turns: list[dict[str, Any]], speaks: list[int], learned: list[int], encoder: Encoder, tools: list[dict] | None
) -> tuple[str, list[tuple[int, int]]]:
    """The text of a conversation, and where in it lies what is learned. `speaks`: the numbers of the assistant's turns.

    A generation block of the template tells. If the template has none, it is what a turn adds: the text with it, and
    the text before it with the words that make the assistant speak.
    """
    template = encoder.tokenizer.get_chat_template(tools=tools)
    if not marks_turns(template):
        text, _ = render(turns, encoder, tools)
        return text, [span_of_turn(number, turns, text, encoder, tools) for number in learned]
    text, spans = render(turns, encoder, tools, return_assistant_tokens_mask=True)
    if learned == speaks:
        return text, spans
    # A turn's blocks are those from the end of what comes before it to the begin of the next turn. A template may write
    # several for one turn, and one more after the last.
    counts = []
    for number in speaks:
        how = {"add_generation_prompt": True, "return_assistant_tokens_mask": True}
        before = render(turns[:number], encoder, tools, **how)[1] if number else []
        counts.append(len(before))
    counts.append(len(spans))
    if counts != sorted(counts):
        raise ValueError("the generation blocks of the chat template do not tell which turn is to be left out")
    blocks = [spans[first:last] for first, last in itertools.pairwise(counts)]
    return text, [span for number, own in zip(speaks, blocks) if number in learned for span in own]


def span_of_turn(
    number: int, turns: list[dict[str, Any]], text: str, encoder: Encoder, tools: list[dict] | None
) -> tuple[int, int]:
    """Where in the text of a conversation the assistant's turn of this number lies."""
    before, _ = render(turns[:number], encoder, tools, add_generation_prompt=True)
    until, _ = render(turns[: number + 1], encoder, tools)
    if not (until.startswith(before) and text.startswith(until)):
        raise ValueError(
            "the chat template has no generation blocks, or has them in a macro or the like, and it writes message "
            f"{number}, counted from 0, or what is before it in another way if more follows; name a template with the "
            "blocks in data.chat_template"
        )
    return len(before), len(until)


class GenerationBlocks(Extension):
    """Reads generation blocks as overlay scopes, which no tag of jinja's own is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.OverlayScope:
        line = next(parser.stream).lineno
        inside = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.OverlayScope(nodes.Const(None), inside, lineno=line)


@functools.cache
def marks_turns(template: str) -> bool:
    """Whether generation blocks of the template tell what the assistant says.

    transformers loses their places within a block whose text is written later than it is made, such as a macro.
    """
    try:
        tree = jinja2.Environment(extensions=[GenerationBlocks, "jinja2.ext.loopcontrols"]).parse(template)
    except jinja2.TemplateSyntaxError:  # To render it says where.
        return False
    later = list(tree.find_all((nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock)))
    later += [loop for loop in tree.find_all(nodes.For) if loop.recursive]
    return tree.find(nodes.OverlayScope) is not None and not any(block.find(nodes.OverlayScope) for block in later)


def render(
    turns: list[dict[str, Any]], encoder: Encoder, tools: list[dict] | None = None, **options: Any
) -> tuple[str, list[tuple[int, int]]]:
    """What the chat template makes of turns, for Encoder.conversation(), and where its generation blocks are."""
    [text], spans = render_jinja_template(
        [encoder.said_by_message(turns)],
        tools=encoder.said_by_message(tools),
        chat_template=encoder.tokenizer.get_chat_template(tools=tools),
        **encoder.tokenizer.special_tokens_map,
        **options,
    )
    return text, spans[0] if spans else []


def rendered(*what: Any) -> str | None:
    """The text of render(); None if the template refuses."""
    try:
        return render(*what)[0]
    except Exception:  # Whatever the template makes of it.
        return None


def accepted_turns(turns: list[dict[str, Any]], encoder: Encoder) -> list[dict[str, Any]]:
    """Turns that are not of the data. Some templates refuse those that do not begin with the system."""
    try:
        render(turns, encoder)
    except jinja2.TemplateError:
        return [{"role": "system", "content": ""}, *turns]
    return turns


def tools_of(value: Any) -> list[dict] | None:
    """The schemas of the functions that a conversation may call, also if they are JSON in a text."""
    schemas = parsed(value) if isinstance(value, str) else without_null_keys(value)  # In a text, a null was meant.
    schemas = [parsed(schema) for schema in schemas or []]
    if not all(isinstance(schema, dict) for schema in schemas):
        raise ValueError(f"tools has {value!r}; it is a list of the JSON schemas of functions")
    return schemas or None


def turns_of(messages: list[dict[str, Any]] | str, role: str = "user") -> list[dict[str, Any]]:
    """Messages as chat templates know them: role, content, and what else they have. A text is said by `role`."""
    if isinstance(messages, str):
        return [{"role": role, "content": messages}]
    turns = []
    for message in messages:
        turn = without_null_keys(message) or {}
        if not isinstance(turn, dict):
            raise ValueError(f"a message is {turn!r:.60}; it has a role and a content")
        if "from" in turn:
            role = turn.pop("from")
            if role not in list(ROLES):  # It may be a list, which cannot be looked up.
                raise ValueError(f"a message is from {role!r}, which is none of {', '.join(ROLES)}")
            turn = without_null_keys(turn | {"role": ROLES[role], "content": turn.pop("value", None)})
        check_turn(turn)
        if isinstance(turn.get("content"), list):
            turn["content"] = "".join(map(text_of, turn["content"]))
        if "tool_calls" in turn:
            turn["tool_calls"] = [call_of(call) for call in parsed(turn["tool_calls"])]
        turns.append(turn)
    return turns


def check_turn(turn: dict[str, Any]) -> None:
    """Raises ValueError for what templates would write in another way than is meant, or not at all."""
    if "role" not in turn:
        raise ValueError(f"a message has {', '.join(turn) or 'nothing'}, and no role")
    role, content = turn["role"], turn.get("content")
    if not isinstance(role, str):
        raise ValueError(f"a message has the role {role!r:.60}, which is no text")
    usual = role.strip().lower()
    if role != usual and usual in ROLES.values():  # What such an assistant says would not be learned.
        raise ValueError(f"a message has the role {role!r}; write {usual!r}")
    if not isinstance(content, (str, list, type(None))):
        raise ValueError(f"a message has the content {content!r}, which is no text; quote it")
    says_more = role == "assistant" and any(turn.get(name) for name in INSTEAD_OF_CONTENT)
    if content is None and role in ("system", "user", "assistant") and not says_more:
        raise ValueError(f"a message has {', '.join(turn)}, and no content")  # Its empty turn would be learned.


def call_of(call: Any) -> dict[str, Any]:
    """A call of a tool. OpenAI writes its arguments as JSON in a text, which many templates would quote once more."""
    call = parsed(call)
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise ValueError(
            f"tool_calls has {call!r}; it is a list of calls, each with the name and arguments of a function"
        )
    function = function | {"arguments": parsed(function.get("arguments") or {})}  # Templates want them, if only empty.
    return call | {"function": function} if "function" in call else function


def parsed(value: Any) -> Any:
    """What JSON in a text says, and anything else as it is."""
    return json.loads(value) if isinstance(value, str) and value.lstrip()[:1] in ("[", "{") else value


def text_of(part: Any) -> str:
    """The text of a part, for contents in parts. Many templates would print a list as Python writes it."""
    is_text = isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    if not is_text:
        raise ValueError(f"a content has the part {part}; a model of language alone reads only type text with its text")
    return part["text"]


def without_null_keys(value: Any) -> Any:
    """Arrow gives each message the keys that any of them has."""
    if isinstance(value, dict):
        return {name: without_null_keys(part) for name, part in value.items() if part is not None}
    if isinstance(value, list):
        return [without_null_keys(part) for part in value]
    return value

"""Conversations with any template: what the assistant says is found, tools reach the template, turns can be left out.

The templates are those of TRL's package, which has them as their authors have published them. What they write is
written here by hand.
"""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import transformers
import trl
from helpers import ROOT
from test_finetune import byte_tokenizer

from samerun.config import Config, Data, Model
from samerun.data.chat import marks_turns
from samerun.data.documents import load_documents
from samerun.data.encode import Encoder
from samerun.data.tokenize import tokenize
from samerun.errors import UserError
from samerun.model.tokenizer import answer_and_rest, load_tokenizer, stop_after_turns
from samerun.run.sample import encode_prompt

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
CHATML = str(ROOT / "configs" / "chat_template.jinja")
MARKERS = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<think>", "</think>"]


@pytest.fixture
def made(tmp_path):
    """What train.py makes of conversations: each as pieces of text, [what is read, what is learned, ..]."""

    def make(rows: list[dict] | Path, template: str | None = None, **settings) -> list[list[str]]:
        if isinstance(rows, list):
            path = tmp_path / "rows.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            rows = path
        own = template and (TEMPLATES / template).read_text()
        name = byte_tokenizer(tmp_path / "tokenizer", own)
        data = Data(files=str(rows), format="chat", tokenizer=name, special_tokens=MARKERS, **settings)
        tokenizer = load_tokenizer(data, Model())
        number = len(list(tmp_path.glob("tokens-*")))
        found = tokenize(load_documents(data), data, tokenizer, tmp_path / f"tokens-{number}")
        return [pieces_of(row, tokenizer) for row in found]

    return make


def pieces_of(row: dict, tokenizer) -> list[str]:
    """The text of the tokens that are not learned, of those that are, and so on in turns."""
    assert all(label in (-100, token) for token, label in zip(row["input_ids"], row["labels"]))
    pieces, is_learned = [[]], False
    for token, label in zip(row["input_ids"], row["labels"]):
        if (label != -100) != is_learned:
            is_learned = not is_learned
            pieces.append([])
        pieces[-1].append(token)
    return [tokenizer.decode(piece) for piece in pieces]


def chat(*turns: tuple, **more) -> dict:
    """A row of messages (role, content), some with further keys."""
    return {"messages": [{"role": role, "content": said} | dict(*keys) for role, said, *keys in turns]} | more


TALK = [("user", "2+2?"), ("assistant", "It is 4."), ("user", "Sure?"), ("assistant", " Yes ")]
LLAMA_SYSTEM = "<|start_header_id|>system<|end_header_id|>\n\n{}Cutting Knowledge Date: December 2023\n"
LLAMA_SYSTEM += "Today Date: 26 Jul 2024\n\n<|eot_id|>"


def llama(role: str, said: str = "") -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n{said}" + "<|eot_id|>" * bool(said)


def qwen(role: str, said: str) -> str:
    return f"<|im_start|>{role}\n{said}<|im_end|>\n"


# Which of it the assistant says ---------------------------------------------------------------------------------------


FAMILIES = {file.stem.removesuffix("_training") for file in TEMPLATES.glob("*_training.jinja")}
FOR_IMAGES = {"idefics3", "smolvlm"}  # Their templates read a message as parts, and leave out what is a plain text.


@pytest.mark.parametrize("family", sorted(FAMILIES - FOR_IMAGES))
def test_the_training_template_of_a_family(tmp_path, capsys, family):
    """In place of the one that is published, unless data.chat_template names another one."""
    name = byte_tokenizer(tmp_path, (TEMPLATES / f"{family}.jinja").read_text())
    data = Data(files="a", format="chat", tokenizer=name)
    assert load_tokenizer(data, Model()).chat_template == (TEMPLATES / f"{family}_training.jinja").read_text()
    assert "TRL's training template" in capsys.readouterr().out
    named = load_tokenizer(data.model_copy(update={"chat_template": CHATML}), Model())
    assert named.chat_template == Path(CHATML).read_text() and capsys.readouterr().out == ""


def test_the_byte_order_mark_of_a_template(tmp_path):
    """Some editors begin a file with it. It is no part of the conversations."""
    (tmp_path / "template").write_text(Path(CHATML).read_text(), encoding="utf-8-sig")
    marked = {"chat_template": str(tmp_path / "template")}
    data = Data(files="a", format="chat", tokenizer=byte_tokenizer(tmp_path / "tokenizer", None), **marked)
    assert load_tokenizer(data, Model()).chat_template == Path(CHATML).read_text()


@pytest.mark.parametrize("family", sorted(FOR_IMAGES))
def test_a_template_that_leaves_out_what_is_said(made, family):
    with pytest.raises(UserError, match="data.chat_template: it leaves out what is said by user and assistant"):
        made([chat(*TALK)], f"{family}.jinja")


def test_a_template_that_trl_knows(made):
    [pieces] = made([chat(*TALK)], "qwen3.jinja")
    none = "<think>\n\n</think>\n\n"  # What the template says of an answer that nobody has thought about.
    assert pieces == [
        qwen("user", "2+2?") + "<|im_start|>assistant\n",
        none + "It is 4.<|im_end|>\n",
        qwen("user", "Sure?") + "<|im_start|>assistant\n",
        none + " Yes <|im_end|>\n",
    ]


def test_a_template_without_marks(made, capsys):
    """Llama 3.1 trims what is said."""
    [pieces, short] = made([chat(*TALK), chat(("user", "A"))], "llama3_1.jinja")
    begin = LLAMA_SYSTEM.format("") + llama("user", "2+2?") + llama("assistant")
    again = llama("user", "Sure?") + llama("assistant")
    assert pieces == [begin, "It is 4.<|eot_id|>", again, "Yes<|eot_id|>"]
    assert short == [LLAMA_SYSTEM.format("") + llama("user", "A")]
    assert "The chat template does not mark what the assistant says" in capsys.readouterr().out


def test_the_marks_say_the_same_as_what_a_turn_adds(made, tmp_path):
    """The end of the line after the end of the turn is the only difference."""
    template = Path(CHATML).read_text().replace("{% generation", "{% if true").replace("endgeneration", "endif")
    assert "generation %}" not in template
    (tmp_path / "template").write_text(template)
    rows = [chat(*TALK), chat(("system", "S"), *TALK), chat(("assistant", "A"), ("user", "B"), ("assistant", ""))]
    marked = made(rows, chat_template=CHATML)
    found = made(rows, chat_template=str(tmp_path / "template"))
    assert list(map("".join, found)) == list(map("".join, marked))
    for one, other in zip(found, marked):
        assert one[1::2] == [f"{said}\n" for said in other[1::2]] != []


def test_the_end_of_a_turn_without_marks(tmp_path):
    name = byte_tokenizer(tmp_path, (TEMPLATES / "llama3_1.jinja").read_text())
    tokenizer = load_tokenizer(Data(files="a", format="chat", tokenizer=name, special_tokens=MARKERS), Model())
    said, _ = answer_and_rest(tokenizer)
    assert tokenizer.decode(said[-1]) == "<|eot_id|>"


def test_a_template_that_writes_a_turn_in_another_way_if_more_follows(made):
    """The published one of Qwen3 writes empty thoughts into the last turn alone."""
    own = str(TEMPLATES / "qwen3.jinja")
    [pieces] = made([chat(*TALK[:2])], chat_template=own)
    assert pieces[1] == "<think>\n\n</think>\n\nIt is 4.<|im_end|>\n"
    with pytest.raises(UserError, match="row 1, counted from 0: the chat template has no"):
        made([chat(*TALK[:2]), chat(*TALK)], chat_template=own)


def test_words_before_an_answer_that_a_template_does_not_write_there(made, tmp_path):
    """Then they do not tell where the answer begins."""
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    (tmp_path / "template").write_text(template + "{% if add_generation_prompt %}assistant: <think>{% endif %}")
    with pytest.raises(UserError, match="row 0, counted from 0: the chat template has no generation blocks"):
        made([chat(*TALK[:2])], chat_template=str(tmp_path / "template"))


# Which turns are learned ----------------------------------------------------------------------------------------------

LEFT_OUT = {"train": {"train": False}, "weight": {"weight": 0}, "either": {"train": False, "weight": 1}}


ENDS_WITH_A_BLOCK = {"chat_template": str(TEMPLATES / "phi3_training.jinja")}
WRITTEN_BY = {"marks": {"chat_template": CHATML}, "none": {"template": "llama3_1.jinja"}, "end": ENDS_WITH_A_BLOCK}


@pytest.mark.parametrize("template", WRITTEN_BY.values(), ids=WRITTEN_BY)
@pytest.mark.parametrize("key", LEFT_OUT)
def test_turns_that_are_left_out(made, template, key):
    (user, hi), (assistant, said), *rest = TALK
    marked = [(user, hi), (assistant, said, LEFT_OUT[key]), *rest]
    [whole, first_only, nothing] = made(
        [chat(*TALK), chat(*marked), chat(*marked[:2])],
        **template,
    )
    assert first_only == ["".join(whole[:3]), *whole[3:]] and nothing == ["".join(nothing)]
    whole_pair, second_only = made([chat(*talk[:2], TALK[3]) for talk in (TALK, marked)], **template)  # Says it twice.
    assert second_only == ["".join(whole_pair[:3]), *whole_pair[3:]] and len(whole_pair) >= 4
    without_last = [*TALK[:3], (*TALK[3], LEFT_OUT[key])]
    chats = [chat(*TALK), chat(*TALK[:3]), chat(*marked[:3]), chat(*without_last)]
    last = made(chats, train_on="last", **template)
    assert last[0] == first_only and last[1][:2] == whole[:2] and len(last[2]) == len(last[3]) == 1


@pytest.mark.parametrize("weight", [1, True, 1.0])
def test_a_turn_that_says_that_it_is_learned(made, weight):
    [pieces] = made([chat(("user", "a"), ("assistant", "b", {"weight": weight}))], chat_template=CHATML)
    assert pieces[1] == "b<|im_end|>"


def test_a_weight_that_is_neither_0_nor_1(made):
    with pytest.raises(UserError, match="row 0, counted from 0: a message has the weight 0.5; 0 leaves it"):
        made([chat(("user", "a"), ("assistant", "b", {"weight": 0.5}))], chat_template=CHATML)


# Tools ----------------------------------------------------------------------------------------------------------------

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"city": {"type": "string"}}}}
TIME = {"type": "function", "function": {"name": "now", "parameters": {"zone": {"type": "integer"}}}}
ARGUMENTS = {"city": "Rome"}


def with_call(arguments, tools) -> dict:
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    row = chat(("user", "Hot?"), ("assistant", "", {"tool_calls": [call]}), ("tool", "30"), ("assistant", "Yes."))
    return row | {"tools": tools}


WAYS = {  # In which data sets have tools, and the arguments of a call.
    "lists and mappings": (ARGUMENTS, [WEATHER, TIME]),
    "JSON in a text": ("\n" + json.dumps(ARGUMENTS), "\n" + json.dumps([WEATHER, TIME])),
    "a list of JSON": (json.dumps(ARGUMENTS), [json.dumps(WEATHER), json.dumps(TIME)]),
}


@pytest.mark.parametrize("way", WAYS)
def test_tools_and_calls_as_qwen3_writes_them(made, way):
    [pieces, without] = made([with_call(*WAYS[way]), chat(*TALK[:2], tools=None)], "qwen3.jinja")
    schemas = "\n".join(map(json.dumps, (WEATHER, TIME)))
    assert pieces[0].startswith("<|im_start|>system\n# Tools\n\n") and f"<tools>\n{schemas}\n</tools>" in pieces[0]
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    assert pieces[1] == f"<think>\n\n</think>\n\n{call}<|im_end|>\n"
    assert pieces[2] == qwen("user", "<tool_response>\n30\n</tool_response>") + "<|im_start|>assistant\n"
    assert pieces[3] == "<think>\n\n</think>\n\nYes.<|im_end|>\n" and len(pieces) == 4
    assert without[0] == qwen("user", "2+2?") + "<|im_start|>assistant\n"


def test_nulls_in_a_text_are_meant(made):
    """Arrow adds nulls to mappings, and none to texts."""
    schema = WEATHER | {"default": None}
    [pieces] = made([with_call(json.dumps({"city": None}), json.dumps([schema]))], "qwen3.jinja")
    assert json.dumps(schema) in pieces[0] and '"arguments": {"city": null}' in pieces[1]


@pytest.mark.parametrize("way", WAYS)
def test_tools_and_calls_as_llama_writes_them(made, way):
    [pieces] = made([with_call(*WAYS[way])], "llama3_1.jinja")
    schemas = "".join(json.dumps(tool, indent=4) + "\n\n" for tool in (WEATHER, TIME))
    assert pieces[0].startswith(LLAMA_SYSTEM.format("Environment: ipython\n"))
    assert pieces[0].endswith(f"Do not use variables.\n\n{schemas}Hot?<|eot_id|>" + llama("assistant"))
    assert pieces[1] == '{"name": "weather", "parameters": {"city": "Rome"}}<|eot_id|>'
    assert pieces[2:] == [llama("ipython", '"30"') + llama("assistant"), "Yes.<|eot_id|>"]


@pytest.mark.parametrize("way", WAYS)
def test_the_shipped_template_writes_tools_and_calls(made, way):
    [pieces] = made([with_call(*WAYS[way])], chat_template=CHATML)
    assert f"<tools>\n{json.dumps(WEATHER)}\n{json.dumps(TIME)}\n</tools>" in pieces[0]
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>'
    assert pieces[1:] == [call, "\n" + qwen("tool", "30") + "<|im_start|>assistant\n", "Yes.<|im_end|>", "\n"]


def test_tools_in_arrow(made, tmp_path):
    """Arrow gives each schema and each call the keys of all, with null in them."""
    calls = [{"function": {"name": "now", "arguments": {"zone": 2}}}]
    row = chat(("user", "When?"), ("assistant", "", {"tool_calls": calls}))
    rows = [with_call(ARGUMENTS, [WEATHER, TIME]), row | {"tools": [TIME]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    _, pieces = made(tmp_path / "rows.parquet", "qwen3.jinja")
    assert f"<tools>\n{json.dumps(TIME)}\n</tools>" in pieces[0]
    assert '<tool_call>\n{"name": "now", "arguments": {"zone": 2}}\n</tool_call>' in pieces[1]


@pytest.mark.parametrize("arguments", [{}, {"arguments": ""}, {"arguments": None}])
def test_a_call_without_arguments(made, arguments):
    calls = [{"function": {"name": "now"} | arguments}]
    [pieces] = made([chat(("user", "When?"), ("assistant", "", {"tool_calls": calls}))], "qwen3.jinja")
    assert '{"name": "now", "arguments": {}}' in pieces[1]


NUMBERS = {"tol": 1e-12, "price": 1.84, "lat": 37.77492912345678, "big": 2**70, "zip": "02139", "is": [True, None]}


@pytest.mark.parametrize("others", [[], [{"a": 1}, {"tol": 1, "zip": ["1"], "is": "true"}]], ids=["alone", "others"])
@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_arguments_are_as_they_were_written(made, tmp_path, suffix, others):
    """Also where those of other calls are of other types."""
    rows = [with_call(arguments, [WEATHER]) for arguments in [*others, NUMBERS]]
    text = json.dumps(rows) if suffix == "json" else "\n".join(map(json.dumps, rows))
    (tmp_path / f"x.{suffix}").write_text(text)
    *_, pieces = made(tmp_path / f"x.{suffix}", "qwen3.jinja")
    assert f'"arguments": {json.dumps(NUMBERS)}}}' in pieces[1]


def test_numbers_of_the_hub_are_as_they_were_written(made, monkeypatch):
    """Where calls have arguments of other types, datasets keeps them as JSON. pandas would round it."""
    monkeypatch.setattr("samerun.data.text_files.leaving_texts", lambda found, cache: found)  # As of the Hub.
    numbers = {"tol": 1e-12, "price": 1.84, "lat": 37.77492912345678}
    *_, pieces = made([with_call(arguments, [WEATHER]) for arguments in ({"tol": "none"}, numbers)], "qwen3.jinja")
    assert f'"arguments": {json.dumps(numbers)}}}' in pieces[1]


@pytest.mark.parametrize("said", ['"hello"', '{"a": 1}', "[1]", "02139", "null"])
def test_texts_that_look_like_json(made, said):
    """Beside contents in parts, which are lists."""
    row = chat(("user", [{"type": "text", "text": "a"}]), ("assistant", said))
    [pieces] = made([row], chat_template=CHATML)
    assert pieces == [qwen("user", "a") + "<|im_start|>assistant\n", f"{said}<|im_end|>", "\n"]


def test_no_calls(made):
    """Arrow may give each message the list of another one, which is empty."""
    row = chat(("user", "a"), ("assistant", "b", {"tool_calls": []}))
    assert made([row], "qwen3.jinja") == made([chat(("user", "a"), ("assistant", "b"))], "qwen3.jinja")


def test_tools_that_are_none(made):
    with pytest.raises(UserError, match="row 0, counted from 0: tools has .*the JSON schemas of functions"):
        made([chat(*TALK, tools=["weather"])], chat_template=CHATML)


def test_an_assistant_that_neither_speaks_nor_calls(made):
    """An empty turn would be learned. Many templates write one."""
    for row in chat(("user", "a"), ("assistant", None)), chat(("user", None), ("assistant", "a")):
        with pytest.raises(UserError, match="row 0, counted from 0: a message has role, and no content"):
            made([row], "qwen3.jinja")
    row = chat(("user", "a"), ("assistant", None, {"tool_calls": [], "reasoning_content": ""}))
    with pytest.raises(UserError, match="a message has role, tool_calls, reasoning_content, and no content"):
        made([row], "qwen3.jinja")
    for role, other in ("assistant", "text"), ("user", "reasoning"):
        row = {"messages": [{"role": "user", "content": "a"}, {"role": role, other: "b"}]}
        with pytest.raises(UserError, match=f"a message has role, {other}, and no content"):
            made([row], chat_template=CHATML)


@pytest.mark.parametrize("is_called", [False, True])
def test_a_template_that_knows_no_functions(made, tmp_path, is_called):
    """It would leave them out, and a turn that calls one would be empty."""
    (tmp_path / "template").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}")
    row = with_call(ARGUMENTS, None) if is_called else chat(("user", "How is the weather?"), *TALK[1:], tools=[WEATHER])
    what = "tool_calls" if is_called else "tools"
    with pytest.raises(UserError, match=f"the chat template does not write {what}; name another"):
        made([row], chat_template=str(tmp_path / "template"))


@pytest.mark.parametrize("role", ["asistant", "developer"])
def test_a_role_that_a_template_does_not_write(made, role):
    """What is said by it would be left out without a word, also if another says the same. Some write any role."""
    row = chat(("user", "a"), ("assistant", "b"), (role, "a"))
    refusal = f"the chat template does not write message 2, counted from 0, whose role is '{role}'; name another in"
    with pytest.raises(UserError, match=f"row 0, counted from 0: {refusal} data.chat_template"):
        made([row], "qwen2_5.jinja")
    assert f"{role}\na" in "".join(made([row], chat_template=CHATML)[0])


@pytest.mark.parametrize("number, role", enumerate(["system", "user", "system", "tool"]))
def test_a_turn_that_a_template_does_not_write(made, tmp_path, number, role):
    """It knows some roles, or some places of them, alone. What it cuts or writes as JSON counts as written."""
    template = "{% for m in messages %}{% if m.role != 'ROLE' or loop.index0 != NUMBER %}{{ m.role }}: "
    template += "{{ m.content | trim | tojson }}\n{% endif %}{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    row = chat(*((role, f' "{role}"\n {place} ') for place, role in enumerate(["system", "user", "system", "tool"])))
    row["messages"].append({"role": "assistant", "content": "Yes."})
    (tmp_path / "template").write_text(template)
    [pieces] = made([row], chat_template=str(tmp_path / "template"))
    assert pieces[1].strip() == '"Yes."'
    (tmp_path / "template").write_text(template.replace("ROLE", role).replace("NUMBER", str(number)))
    with pytest.raises(UserError, match=f"does not write message {number}, counted from 0, whose role is '{role}'"):
        made([row], chat_template=str(tmp_path / "template"))


@pytest.mark.parametrize("others", [["It is 30."], ["30", "30"]])
def test_a_turn_that_a_template_does_not_write_and_others_say(made, tmp_path, others):
    (tmp_path / "template").write_text(
        "{% for m in messages %}{% if m.role != 'tool' %}{{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}"
    )
    row = chat(*(("assistant", said) for said in others[1:]), ("tool", "30"), ("assistant", others[0]))
    refusal = f"does not write message {len(others) - 1}, counted from 0, whose role is 'tool'"
    with pytest.raises(UserError, match=refusal):
        made([row], chat_template=str(tmp_path / "template"))


@pytest.mark.parametrize("template", ["llama3_1.jinja", "gptoss_training.jinja"])
def test_what_is_said_beside_a_call(made, template):
    """These templates write the call alone, at least once a later turn has the answer."""
    row = with_call(ARGUMENTS, None)
    row["messages"][1]["content"] = "I look."
    [pieces] = made([row], template)
    assert "weather" in "".join(pieces) and "I look." not in "".join(pieces)


def test_a_prompt_that_is_written_with_its_completion(made, tmp_path):
    """The system's words are a part of the first user's turn, which is in the completion."""
    template = "{% for m in messages %}{% if m.role == 'user' %}{{ messages[0].content }} {% endif %}"
    template += "{% if m.role != 'system' %}{{ m.role }}: {% generation %}{{ m.content }}{% endgeneration %}{% endif %}"
    (tmp_path / "template").write_text(template + "{% endfor %}")
    first, *others = chat(("system", "s"), ("user", "a"), ("assistant", "b"))["messages"]
    [pieces] = made([{"prompt": [first], "completion": others}], chat_template=str(tmp_path / "template"))
    assert "".join(pieces).startswith("s user: aassistant: b")


def test_tools_of_a_prompt_and_a_completion(made):
    row = with_call(ARGUMENTS, [WEATHER])
    *prompt, answer = row["messages"]
    [whole] = made([row], chat_template=CHATML)
    [pair] = made([{"prompt": prompt, "completion": [answer], "tools": row["tools"]}], chat_template=CHATML)
    assert pair == ["".join(whole[:3]), *whole[3:]] and "weather" in pair[0]


def test_a_template_does_not_see_the_weights(made, tmp_path):
    (tmp_path / "template").write_text(
        "{% for m in messages %}{% generation %}{{ m.content }}{{ m | length }}{% endgeneration %}{% endfor %}"
    )
    prompt, completion = (chat((role, role[0], {"weight": 1}))["messages"] for role in ("user", "assistant"))
    [pieces] = made([{"prompt": prompt, "completion": completion}], chat_template=str(tmp_path / "template"))
    assert pieces == ["u2", "a2"]


def test_a_prompt_without_messages(made):
    first, *others = chat(*TALK)["messages"]
    rows = [{"prompt": prompt, "completion": others} for prompt in ([first], [])]
    with pytest.raises(UserError, match="row 1, counted from 0: its prompt has no messages"):
        made(rows, chat_template=CHATML)


@pytest.mark.parametrize("name", ["thinking", "reasoning", "reasoning_content"])
def test_thoughts_that_a_template_does_not_write(made, tmp_path, name):
    """Also where it has the word. Those of earlier turns may be left out, and one of two names may be unknown."""
    row = chat(("user", "a"), ("assistant", "b", {name: "Hm."}), ("user", "c"), ("assistant", "d"))
    silent = "{# " + name + " #}{% set " + name + " = enable_" + name + " %}{{ m.role }}: {{ m.content }}"
    last = "{{ m." + name + " if loop.last }}{{ m.content }}"
    both = chat(("user", "a"), ("assistant", "b", {name: "Hm.", "thinking": "Hm.", "reasoning": "Hm."}))

    def learned(written: str, row: dict) -> str:
        turn = "{% for m in messages %}{% generation %}" + written + "{% endgeneration %}{% endfor %}"
        (tmp_path / "template").write_text(turn)
        return str(made([row], chat_template=str(tmp_path / "template")))

    with pytest.raises(UserError, match=f"row 0, .*the chat template does not write {name}; name another"):
        learned(silent, row)
    assert "Hm." in learned("{{ m | tojson }}", row) and "Hm." not in learned(last, row)
    assert learned(last, both).count("Hm.") == 1


LATER = {
    "macro": "{% macro f(m) %}GENERATION{% endmacro %}{% for m in messages %}{{ f(m) }}{% endfor %}",
    "set": "{% for m in messages %}{% set said %}GENERATION{% endset %}{{ said }}{% endfor %}",
    "filter": "{% for m in messages %}{% filter string %}GENERATION{% endfilter %}{% endfor %}",
    "recursive": "{% for m in messages recursive %}GENERATION{% endfor %}",
    "set by a filter": "{% for m in messages %}{% set said | indent(width=0) %}GENERATION{% endset %}"
    "{{ said }}{% endfor %}",
    "at once": "{% set a = 1 %}{% for m in messages %}GENERATION{% endfor %}",
}


def test_a_tokenizer_with_generation_blocks_in_a_macro(tmp_path, capsys):
    """TRL says that nothing need be done about them."""
    block = "{% generation %}{{ m.content }}{% endgeneration %}"
    text = LATER["macro"].replace("GENERATION", f"<{{{{ m.role }}}}>{block}")
    name = byte_tokenizer(tmp_path / "tokenizer", text)
    tokenizer = load_tokenizer(Data(files="a", format="chat", tokenizer=name, special_tokens=MARKERS), Model())
    assert tokenizer.chat_template == text and "by what a turn adds to the text" in capsys.readouterr().out


@pytest.mark.parametrize("way", LATER)
def test_generation_blocks_whose_text_is_written_later(made, tmp_path, way):
    """transformers counts from where the text is made, so that other characters would be learned."""
    block = "{% generation %}{{ m.content }}{% endgeneration %}"
    block = f"<{{{{ m.role }}}}>{{% if m.role == 'user' %}}{{{{ m.content }}}}{{% else %}}{block}{{% endif %}}"
    prompt = "{% if add_generation_prompt %}<assistant>{% endif %}"
    (tmp_path / "template").write_text(LATER[way].replace("GENERATION", block) + prompt)
    [pieces] = made([chat(*TALK)], chat_template=str(tmp_path / "template"))
    told = [f"<{role}>" + (content if role == "user" else "") for role, content in TALK]
    answers = [content for role, content in TALK if role == "assistant"]
    assert pieces[1::2] == answers and "".join(pieces[::2]) == "".join(told)


def test_generation_blocks_that_later_messages_take_away(made, tmp_path):
    """With them, the block that begins after the first two messages is no longer the one of the first answer."""
    block = "{% generation %}{{ m.content }}{% endgeneration %}"
    block = "{% if loop.length < 4 %}" + block + "{% else %}{{ m.content }}{% endif %}"
    (tmp_path / "template").write_text("{% for m in messages %}{{ m.role }}: " + block + "{% endfor %}")
    row = chat(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d", {"weight": 0}))
    with pytest.raises(UserError, match="the generation blocks of the chat template do not tell which turn is to be"):
        made([row], chat_template=str(tmp_path / "template"))


def test_only_generation_blocks_mark_turns():
    assert not marks_turns(
        "{% autoescape false %}{% for m in messages %}{{ m.content }}{% endfor %}{% endautoescape %}"
    )


def test_a_template_that_refuses_a_short_answer(made, tmp_path, capsys):
    """Of its own making: the messages of the data have what the template wants."""
    text = "{% for m in messages %}{{ m.name + ': ' + m.content }}{% endfor %}"
    tokenizer = transformers.AutoTokenizer.from_pretrained(byte_tokenizer(tmp_path / "tokenizer", text))
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(hidden_size=32, num_hidden_layers=1))
    ends = model.generation_config.eos_token_id
    stop_after_turns(model, tokenizer)
    assert model.generation_config.eos_token_id == ends
    assert (
        "The chat template refuses a short answer ('dict object' has no attribute 'name')." in capsys.readouterr().out
    )


def test_a_template_for_tools_beside_the_default(tmp_path):
    """TRL's template takes the place of the default alone."""
    both = {"default": (TEMPLATES / "qwen3.jinja").read_text(), "tool_use": "{{ messages }} {{ tools }}"}
    name = byte_tokenizer(tmp_path / "tokenizer", both)
    tokenizer = load_tokenizer(Data(files="a", format="chat", tokenizer=name, special_tokens=MARKERS), Model())
    assert tokenizer.chat_template["tool_use"] == both["tool_use"]
    assert "{% generation %}" in tokenizer.chat_template["default"]


# Pairs, and variables of the template ---------------------------------------------------------------------------------


@pytest.mark.parametrize("column", [["question", "answer"], None])
def test_columns_of_texts_are_a_user_and_an_assistant(made, column):
    names = column or ["prompt", "completion"]
    [pieces] = made([dict(zip(names, ("2+2?", "4")))], chat_template=CHATML, column=column)
    assert pieces == [qwen("user", "2+2?") + "<|im_start|>assistant\n", "4<|im_end|>", "\n"]


def test_columns_of_pairs_by_their_names(tmp_path, made):
    (tmp_path / "qa.jsonl").write_text(json.dumps({"q": "2+2", "a": "=4", "text": "no"}) + "\n")
    data = Data(files=str(tmp_path / "qa.jsonl"), column=["q", "a"], tokenizer=byte_tokenizer(tmp_path / "t", None))
    tokenizer = load_tokenizer(data, Model())
    [row] = tokenize(load_documents(data), data, tokenizer, tmp_path / "tokens")
    assert pieces_of(row, tokenizer) == ["2+2", "=4<|im_end|>"]
    (tmp_path / "ids.jsonl").write_text(json.dumps({"q": [1], "a": [2]}) + "\n")
    tokens = Data(files=str(tmp_path / "ids.jsonl"), column=["q", "a"], format="tokens")
    with pytest.raises(UserError, match="data.column: tokens have one column"):
        load_documents(tokens)


SAYS = "{{ mood }}|{{ level + 1 }}|{% if thinks is defined and not thinks %}quick{% endif %}|{{ names | join(',') }}|"


def test_variables_are_the_same_in_training_and_in_samples(made, tmp_path):
    (tmp_path / "template").write_text(SAYS + Path(CHATML).read_text())
    variables = {"mood": 'so "so"\n\\ é', "level": 3, "thinks": False, "names": ["a", "b"]}
    settings = {"chat_template": str(tmp_path / "template"), "chat_template_kwargs": variables}
    said = 'so "so"\n\\ é|4|quick|a,b|' + qwen("user", "a") + "<|im_start|>assistant\n"
    [pieces] = made([chat(("user", "a"), ("assistant", "b"))], **settings)
    assert pieces == [said, "b<|im_end|>", "\n"]
    data = {"files": ["a"], "format": "chat", "tokenizer": str(tmp_path / "tokenizer"), "eval_fraction": 0.1} | settings
    config = Config(
        run={"max_steps": 1}, batch={"global_batch_size": 1}, data=data, model={"architecture": {"model_type": "llama"}}
    )
    tokenizer = load_tokenizer(config.data, config.model)
    assert tokenizer.decode(encode_prompt("a", config, Encoder(tokenizer))[0]) == said
    tokenizer.save_pretrained(tmp_path / "exported")
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    turns = [{"role": "user", "content": "a"}]
    assert exported.apply_chat_template(turns, add_generation_prompt=True, tokenize=False) == said
    other = exported.apply_chat_template(turns, add_generation_prompt=True, tokenize=False, thinks=True)
    assert other == said.replace("quick", "")


def test_a_variable_leaves_the_line_by_which_a_template_begins(made, tmp_path):
    (tmp_path / "template").write_text("\n{{ mood }}" + Path(CHATML).read_text())
    settings = {"chat_template": str(tmp_path / "template"), "chat_template_kwargs": {"mood": "so"}}
    [pieces] = made([chat(("user", "a"), ("assistant", "b"))], **settings)
    assert pieces[0] == "\nso" + qwen("user", "a") + "<|im_start|>assistant\n"


def test_samples_that_do_not_think(tmp_path):
    name = byte_tokenizer(tmp_path, (TEMPLATES / "qwen3.jinja").read_text())
    data = {"files": ["a"], "format": "chat", "tokenizer": name, "chat_template_kwargs": {"enable_thinking": False}}
    config = Config(
        run={"max_steps": 1}, batch={"global_batch_size": 1}, data=data, model={"architecture": {"model_type": "llama"}}
    )
    tokenizer = load_tokenizer(config.data, config.model)
    expected = qwen("user", "a") + "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert tokenizer.decode(encode_prompt("a", config, Encoder(tokenizer))[0]) == expected


def test_templates_of_which_none_is_the_default(tmp_path):
    tokenizer = byte_tokenizer(tmp_path, {"rag": "a", "tool_use": "b"})
    with pytest.raises(UserError, match="data.chat_template: null.* only for rag, tool_use; name a file"):
        load_tokenizer(Data(files="a", format="chat", tokenizer=tokenizer), Model())


@pytest.mark.parametrize("calls", ["x", {"name": "x"}, [["x"]], [{"function": "x"}]])
def test_calls_that_are_none(made, calls):
    with pytest.raises(UserError, match="row 0, counted from 0: .*tool_calls has .*a list of calls"):
        made([chat(("user", "a"), ("assistant", "b", {"tool_calls": calls}.items()))], chat_template=CHATML)


@pytest.mark.parametrize("name, problem", [("enable_thinkng", "does not read it"), ("messages", "always gets it")])
def test_a_variable_that_would_do_nothing(tmp_path, name, problem):
    tokenizer = byte_tokenizer(tmp_path, (TEMPLATES / "qwen3.jinja").read_text())
    data = Data(files="a", format="chat", tokenizer=tokenizer, chat_template_kwargs={name: False})
    with pytest.raises(UserError, match=f"data.chat_template_kwargs: {name}: .*{problem}"):
        load_tokenizer(data, Model())


@pytest.mark.parametrize("change", [" | upper", "[:20]", "[-20:]"])
def test_a_template_that_changes_what_is_said(made, tmp_path, change):
    """The name of a special token, which is another one while the template is rendered, would be changed, too."""
    changing = Path(CHATML).read_text().replace("message['content'] + ''", f"message['content']{change}")
    (tmp_path / "template").write_text(changing)
    said = chat(("user", "a"), ("assistant", "the end is <|im_end|> here"))
    with pytest.raises(UserError, match="row 0, counted from 0: .*the chat template changes that text"):
        made([said], chat_template=str(tmp_path / "template"))

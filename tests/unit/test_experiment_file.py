"""Experiments and studies as YAML: what is read, what is refused, and with which words."""

from __future__ import annotations

import re
import string
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab import experiment_file
from moelab.errors import BadInput
from moelab.experiment import (
    MAX_ARM_CHARACTERS,
    MOST_LAYERS,
    EPBackend,
    Experiment,
    OwnHardware,
    Precision,
    Routing,
    ShapeChanges,
)
from moelab.experiment_file import (
    ADDED_FIELDS,
    END_KEY,
    MAX_FILE_BYTES,
    VERSION_KEY,
    Study,
    make_study,
    parse,
    parse_overrides,
    read_experiment,
    read_record,
    read_study,
    read_yaml,
    write_experiment,
)
from moelab.layout import training_of

DEGREES = ("nodes", "gpus_per_node", "dp_replicate", "tp", "pp", "cp", "ep")
CHOICES = ("model", "mxfp8_kernels", "quantize", "wgrad", "dispatch_precision", "activation_checkpoint", "compile")

names = st.text(string.ascii_letters + string.digits, min_size=1, max_size=1).flatmap(
    lambda first: st.text(string.ascii_letters + string.digits + "._-", max_size=79).map(lambda rest: first + rest)
)
texts = st.text(st.characters(codec="utf-8").filter(str.isprintable), max_size=1_000)
experiments = st.builds(
    Experiment,
    name=names,
    hardware=names
    | st.builds(
        OwnHardware,
        name=names,
        gpu=texts,
        nvlink_gpus=st.none() | st.integers(8, 10**6),
        nic_gb_s=st.none() | st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    ),
    precision=st.sampled_from(Precision),
    ep_backend=st.sampled_from(EPBackend),
    routing=st.sampled_from(Routing),
    dataset=st.sampled_from(["python", "c4"]),
    pp_schedule=texts,
    dp_shard=st.just(-1) | st.integers(1, 10**6),
    seq_len=st.integers(8, 10**7),
    warmup_steps=st.integers(0, 10**6),
    lr=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    seed=st.integers(0, 2**32 - 1),
    **{name: st.integers(1, 10**6) for name in (*DEGREES, "local_batch", "microbatch", "steps")},
    **{name: st.sampled_from(get_args(Experiment.model_fields[name].annotation)) for name in CHOICES},
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "my_study.yaml"


def study_of(file: Path, text: str, *overrides: str) -> Study:
    file.write_text(text)
    return read_study(file, overrides)


def complaint(file: Path, text: str, *overrides: str) -> str:
    """What is said about a file that is refused; nothing but the file may be there afterwards."""
    with pytest.raises(BadInput) as refused:
        study_of(file, text, *overrides)
    assert list(file.parent.iterdir()) == [file]
    return str(refused.value)


# What is read


@given(experiment=experiments)
def test_every_experiment_survives_yaml(tmp_path_factory: pytest.TempPathFactory, experiment: Experiment) -> None:
    file = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    text = write_experiment(experiment)
    file.write_text(text)
    assert read_record(file) == read_experiment(file) == experiment
    assert list(yaml.safe_load(text)) == [VERSION_KEY, *Experiment.model_fields, END_KEY]


@pytest.mark.parametrize("name", ["no", "on", "null", "1e-4", "0x1F", "2024-01-01", "1_000", "010", "1e5"])
def test_the_traps_among_names(file: Path, name: str) -> None:
    file.write_text(write_experiment(Experiment(name=name)))
    assert read_experiment(file).name == name


BF16, MXFP8 = "bf16_standard", "mxfp8_standard"
TWO_ARMS = "experiment: {steps: 3}\narms: [{precision: bf16, steps: 4}, {precision: mxfp8}]\nseeds: [5, 1]"
BY_LR = "arms: [{arm_fields: [lr]}, {lr: 1.0e-4, arm_fields: [lr]}, {arm_fields: [lr], tp: 2}]"
STUDIES: list[tuple[str, Sequence[str], str, list[tuple[str, int, int, float]]]] = [
    ("name: alone\nsteps: 5", (), "alone", [(BF16, 0, 5, 3e-3)]),
    ("{}", (), "study", [(BF16, 0, 60, 3e-3)]),
    ("experiment: {steps: 4}", (), "my_study", [(BF16, 0, 4, 3e-3)]),
    ("- {precision: bf16}\n- {precision: mxfp8, seed: 3}", (), "my_study",
     [(BF16, 0, 60, 3e-3), (MXFP8, 3, 60, 3e-3)]),
    (TWO_ARMS, (), "my_study",  # arms alternate within each seed
     [(BF16, 5, 4, 3e-3), (MXFP8, 5, 3, 3e-3), (BF16, 1, 4, 3e-3), (MXFP8, 1, 3, 3e-3)]),
    (TWO_ARMS, ["steps=9", "seeds=[0]", "lr=2e-3"], "my_study", [(BF16, 0, 9, 2e-3), (MXFP8, 0, 9, 2e-3)]),
    ("- {precision: bf16, steps: 4}\n- {precision: mxfp8}", ["steps=9"], "my_study",
     [(BF16, 0, 9, 3e-3), (MXFP8, 0, 9, 3e-3)]),
    ("study: first\narms: [{tp: 2}]", ["study=other", "seeds=[4, 5]", "arms=[{precision: mxfp8}]"], "other",
     [(MXFP8, 4, 60, 3e-3), (MXFP8, 5, 60, 3e-3)]),
    (BY_LR, (), "my_study", [(f"{BF16}_lr-0.003", 0, 60, 3e-3), (f"{BF16}_lr-0.0001", 0, 60, 1e-4),
                             (f"{BF16}_lr-0.003_tp-2", 0, 60, 3e-3)]),  # names that a person gave arms stay
    (write_experiment(Experiment(steps=7)), ["seed=2"], "study", [(BF16, 2, 7, 3e-3)]),
    ("lr: 1e-4", (), "study", [(BF16, 0, 60, 1e-4)]),  # which YAML reads as text
    ("lr: '1e-4'", (), "study", [(BF16, 0, 60, 1e-4)]),
    ("lr: 1E-05", (), "study", [(BF16, 0, 60, 1e-5)]),
    ("steps: '20'\nseed: 7.0\nlr: 3", (), "study", [(BF16, 7, 20, 3.0)]),
    ("hardware: {name: a, gpu: H100, nvlink_gpus: 8}", (), "study", [(BF16, 0, 60, 3e-3)]),  # those of its node
    ("lr: 1", ["lr = 1.0e-3", "steps=4", "steps=5", "name='no'"], "no", [(BF16, 0, 5, 1e-3)]),  # the last wins
]  # fmt: skip


@pytest.mark.parametrize(("text", "pairs", "name", "runs"), STUDIES)
def test_a_study_is_read(
    file: Path, text: str, pairs: Sequence[str], name: str, runs: list[tuple[str, int, int, float]]
) -> None:
    study = study_of(file, text, *pairs)
    assert {study.name, *(one.name for one in study.experiments)} == {name}
    assert [(one.arm, one.seed, one.steps, one.lr) for one in study.experiments] == runs
    assert study.arms == tuple(dict.fromkeys(arm for arm, *_ in runs))


def test_values_of_set_are_yaml() -> None:
    pairs = ["a=1", "b=[1, 2]", "c=x y", "d=null", "pp_schedule=a=b"]
    assert parse_overrides(pairs) == {"a": 1, "b": [1, 2], "c": "x y", "d": None, "pp_schedule": "a=b"}


# What is refused


# Of each field, what YAML gives that must be told on one line with the field and Python's word for the value.
FAULTS = {
    "nodes": {"0": "0", "yes": "True"},
    "ep": {"-2": "-2"},
    "dp_shard": {"0": "0", "-2": "-2"},
    "lr": {"-1.0e-3": "-0.001", ".nan": "nan", ".inf": "inf", "1e999": "'1e999'", "fast": "'fast'", "on": "True"},
    "steps": {"1,000": "'1,000'", "2.5": "2.5", ".nan": "nan", "": "None", "[1]": "[1]", "{a: 1}": "{'a': 1}"},
    "seed": {"-1": "-1", "4294967296": "4294967296", "1.0e+400": "inf", "no": "False"},
    "seq_len": {"7": "7"},
    "precision": {"int8": "'int8'", "no": "False"},
    "model": {"17B": "'17B'"},
    "compile": {"no": "False"},
    "name": {
        "2024": "2024",
        '"a\\nb"': "'a\\nb'",
        '"a\\0b"': "'a\\x00b'",
        "a" * 81: "'aaaa",
        "''": "''",
        **{word: repr(word) for word in ("../x", "a/b", "/etc", "..", ".hidden", "-rf", "; rm -rf ~", "$(id)")},
    },
    "hardware": {"../../etc": "'../../etc'"},
}


@pytest.mark.parametrize("field", FAULTS)
def test_a_fault_is_named_on_one_line(file: Path, field: str) -> None:
    for text, value in FAULTS[field].items():
        words = complaint(file, f"{field}: {text}")
        assert words.startswith(f"{field}: got {value}")
        assert "; valid: " in words
        assert len(words.splitlines()) == 1


def test_several_faults_are_all_named_and_of_very_many_the_first(file: Path) -> None:
    lines = complaint(file, "ep: 0\nnodes: no\nlr: x\nspeed: 3").splitlines()
    assert sorted(re.split("[:;]", line)[0] for line in lines) == ["ep", "lr", "nodes", "unknown field 'speed'"]
    lines = complaint(file, "".join(f"k{i}: 1\n" for i in range(3000))).splitlines()
    assert (len(lines), lines[0][:19], lines[-1]) == (11, "unknown field 'k0';", "and 2,990 more")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, file: Path) -> None:
    for path, words in ((tmp_path / "missing.yaml", r"missing\.yaml cannot be read: No such file"),
                        (tmp_path, "cannot be read: Is a directory"),
                        (Path("/dev/zero"), "cannot be read: it is not a regular file")):  # fmt: skip
        with pytest.raises(BadInput, match=words):
            read_yaml(path)
    for data in (b"name: \xff\xfe", "name: café".encode("latin-1"), "steps: 3".encode("utf-16")):
        file.write_bytes(data)
        with pytest.raises(BadInput, match="is not UTF-8 text"):
            read_study(file)
    file.write_bytes(b"\xef\xbb\xbfsteps: 3\n")  # a byte-order mark
    assert read_experiment(file).steps == 3
    file.write_bytes(b"- {}\n" * (MAX_FILE_BYTES // 5) + b"\n")
    with pytest.raises(BadInput, match="too large"):
        read_study(file)


REFUSED = {
    "found nothing": [""],
    "found str 'just words'": ["just words"],
    "each entry of the list must be a mapping": ["[1, 2]", "- [steps, 3]"],
    "study 'my_study' is empty": ["[]", "seeds: []", "arms: []"],
    "'steps' is given twice, near line 1": ["steps: 1\nsteps: 2"],
    "'lr' is given twice, near line 2": ["study: a\nexperiment: {lr: 1, steps: 2, lr: 1}"],
    "not valid YAML": [
        "steps: [", "a: b: c", "steps: !!python/object/apply:os.system ['true']", "? [1, 2]\n: 3", "lr: 2024-13-45",
        'lr: !!int ""', "lr: !!timestamp x", "steps: !!int abc", "compile: !!bool maybe", f"steps: {'9' * 5000}",
        "steps: 1\n---\nsteps: 2", "\x07",
    ],
    "merging with << is not supported": ["base: &b {steps: 3}\nexperiment: {<<: *b}"],
    "seeds: got 3; valid: a list of integers": ["seeds: 3"],
    "seeds: got None; valid: a list of integers": ["seeds:"],
    "seed: got True": ["seeds: [0, yes]"],
    "seed: got 1.5": ["seeds: [0, 1.5]"],
    "has the same arm and seed twice (bf16_standard, seed 0)": [
        "seeds: [0, 0]", "arms: [{precision: bf16}, {}]", "- {seed: 0}\n- {seed: 0, steps: 60}",
    ],
    "the same arm and seed twice (bf16_standard_lr-2.0, seed 0)": ["arms: [{lr: 1}, {lr: 2}, {lr: 2.0}]"],
    "`arms` a list": ["arms:", "arms: [bf16, mxfp8]"],
    "`experiment` must be a mapping": ["experiment: [1]"],
    "arm_fields: got ['lrr']; valid: names of fields; not one: lrr; known: model": ["arms: [{arm_fields: [lrr]}]"],
    "valid: names of fields; not one: seed, shape": ["arms: [{arm_fields: [seed, shape]}]"],
    "seed is not a field of one arm here": ["arms: [{precision: bf16, seed: 3}]"],
    "name is not a field of one arm here": ["experiment: {name: x}"],
    "unknown key 'steps' of a study; fields of an experiment go under": ["seeds: [0]\nsteps: 3"],
    "unknown key 'experimnt' of a study; did you mean 'experiment'?": ["seeds: [0]\nexperimnt: {}"],
    "unknown key 'seed' of a study; did you mean 'seeds'?": ["arms: [{}]\nseed: 3"],
    "study: got 2024; valid: a name": ["study: 2024"],
    "study: got False; valid: a name": ["study: no"],
    "name: got '../up'": ["study: ../up"],
    "share one name, found a, b": ["- {name: a}\n- {name: b, seed: 1}"],
    "unknown field 'shape.experts'; did you mean 'shape.num_experts'?": ["shape: {experts: 4}"],
    "trace_step: got 1; valid: 0 (no trace)\n": ["steps: 1\ntrace_step: 1"],
    "shape.top_k: got 0; valid: ": ["shape: {top_k: 0}"],
    "unknown field 'nodse'; did you mean 'nodes'?": ["nodse: 4"],
    "did you mean 'precision'?": ["Precision: 4"],
    "known fields: name, model, shape, precision": ["learning_rate: 4"],
    "the record was cut off": [write_experiment(Experiment())[:-40]],
}  # fmt: skip
ALIASES = "is not supported: write it out"
BOMB = "a0: &a0 [lol, lol]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 30))
SETTINGS = {
    "steps": "--set 'steps': expected key=value, such as --set steps=20",
    "=3": "--set '=3': expected key=value",
    "steps=[": "--set 'steps=[': the value is not valid YAML",
    f"steps={'{a: ' * 2000}": "the value is not valid YAML",
    "steps={a: 1, a: 2}": "'a' is given twice",
    "lr=2024-99-99": "the value is not valid YAML",
    "steps=": "steps: got None; valid: a whole number",
    "steps=yes": "steps: got True; valid: a number",
    "shape={num_shared_experts: yes}": "shape.num_shared_experts: got True; valid: a number, and this is a truth",
    "hardware={name: a, gpu: H100, memory_gib: on}": "hardware.memory_gib: got True; valid: a number, and this",
    "hardware={name: a, gpu: H100, memory_gib: 81559}": "memory_gib: got 81559; valid: less than 10000",
    "hardware={name: a, gpu: H100, nvlink_gpus: 7}": "nvlink_gpus: got 7; valid: at least the 8 GPUs of a node",
    "hardware={name: a, gpu: a, capability: 90}": "capability: got 90; valid: less than 30",
    'hardware={name: a, gpu: "\\e[31m"}': "U+001B among them",
    "hardware=8": "hardware: got 8; valid: a name",
    "stepz=3": "unknown field 'stepz'; did you mean 'steps'?",
}
STUDY_SETTINGS = {"seed=3": "`seeds`", "name=other": "`study`"}  # which a study would ignore
TOO_MUCH = {
    f"steps: {'9' * 90_000}": "is not valid YAML: Exceeds the limit",
    f"steps: 0x{'f' * 900}": "steps: got '0xffff",
    f"steps: {':'.join(['59'] * 100_000)}": "steps: got '59:59:",  # of base 60, which YAML 1.1 has
    "lr: 1.0e+400": "lr: got inf; valid: a finite number",
    f"steps: {10**12}": "steps: got 1000000000000; valid: less than or equal to 1000000000",
    f"nodes: {10**12}": "nodes: got 1000000000000; valid: less than or equal to 1000000",
    f"seeds: [{','.join(map(str, range(150_000)))}]": "has 150,000 experiments; valid: at most 10,000",
    f"[{', '.join('{seed: 1}' for _ in range(10_001))}]": "has 10,001 experiments; valid: at most 10,000",
    f"{BOMB}steps: *a29": ALIASES,
    "experiment: &a {shape: *a}": ALIASES,
    "experiment: " + "[" * 400_000: "maximum nesting depth",
    "{a: " * 50_000: "maximum nesting depth",
    f"pp_schedule: {'x' * 900_000}": "at most 1000 characters; this has 900000\n",
}


@pytest.mark.parametrize(
    ("text", "pairs", "words"),
    [
        *((text, (), words) for words, texts in REFUSED.items() for text in texts),
        *((text, (), words) for text, words in TOO_MUCH.items()),
        *(("steps: 3", (pair,), words) for pair, words in SETTINGS.items()),
        *(("study: s\nseeds: [0]", (pair,), words) for pair, words in STUDY_SETTINGS.items()),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_wrong_is_named_on_one_line_and_fills_no_memory(
    file: Path, text: str, pairs: Sequence[str], words: str
) -> None:
    start = time.process_time()
    message = complaint(file, text, *pairs)
    assert words in f"{message}\n"
    assert len(message.splitlines()) == 1
    assert len(message) < 1500
    assert time.process_time() - start < 10


@pytest.mark.parametrize("sign", ["\x1b", "\x00", "\u202e", "\u2066", "\x7f", "\n", "\x85", "\u200b"])
def test_a_sign_that_cannot_be_seen_is_refused_by_name(file: Path, sign: str) -> None:
    for field in ("pp_schedule", "name", "hardware"):
        file.write_text(yaml.safe_dump({field: f"1F1B{sign}"}))
        with pytest.raises(BadInput) as error:
            read_study(file)
        assert str(error.value).startswith(f"{field}: got ")
        assert str(error.value).isprintable()
    with pytest.raises(BadInput, match=re.escape(f"U+{ord(sign):04X}")):
        parse(Experiment, {"pp_schedule": sign})


def test_one_experiment_is_wanted_where_one_is_wanted(file: Path) -> None:
    file.write_text("seeds: [0, 1]")
    with pytest.raises(BadInput, match="holds 2 experiments; one was expected"):
        read_experiment(file)


# Names of arms


OTHER_VALUES: dict[str, Any] = yaml.safe_load("""\
{model: debug, shape: {n_layers: 3}, precision: mxfp8, mxfp8_kernels: emulated, quantize: experts+linears, wgrad: bf16,
ep_backend: deepep, ep_kernels: emulated, dispatch_precision: mxfp8, routing: round_robin, nodes: 2, gpus_per_node: 4,
dp_replicate: 2, dp_shard: 1, tp: 2, pp: 2, pp_stages_per_rank: 2, pp_schedule: ../Zero Bubble_V, cp: 2, ep: 1,
seq_len: 512, local_batch: 8, microbatch: 2, accumulate_gradients: true, steps: 61, warmup_steps: 0,
lr: 1.0e-5, attention_backend: varlen,
activation_checkpoint: full+dispatch, compile: model+loss, dataset: c4, hardware: h100_of_mine, capture_step: 12,
trace_step: 12, trace_ranks: [0, 1], memory_snapshot: true, validate_every: 5, overrides: [mine.a_b.fused, mine.c]}
""")
"""Another value of each field than its default."""
MATTERS: dict[str, dict[str, Any]] = {
    "mxfp8_kernels": {"precision": "mxfp8"},
    "quantize": {"precision": "mxfp8"},
    "wgrad": {"precision": "mxfp8"},
    "ep_kernels": {"ep_backend": "deepep"},
    "pp_schedule": {"pp": 2},
    "pp_stages_per_rank": {"pp": 2},
    "microbatch": {"accumulate_gradients": True},
    "trace_ranks": {"trace_step": 2},
    "memory_snapshot": {"trace_step": 2},
}
"""Beside what a field makes a difference, where it makes none by itself."""
IN_THE_NAME = {"shape": "n-layers-3", "pp_schedule": "pp-schedule-..-Zero-Bubble-V",
               "trace_ranks": "trace-ranks--0--1-", "overrides": "overrides-mine.a-b.fused+mine.c",
               "hardware": "hardware-h100-of-mine"}  # fmt: skip
HAS_A_PLACE = ("precision", "ep_backend", "dispatch_precision", "routing", "quantize", "wgrad")
"""What an arm's name has by itself; of the others the field and its value, or as above."""


def test_an_arm_is_the_fields_in_which_it_differs() -> None:
    assert OTHER_VALUES.keys() == Experiment.model_fields.keys() - {"name", "seed", "arm_fields"}
    for field, value in OTHER_VALUES.items():
        shared = MATTERS.get(field, {})
        study = make_study("s", shared, [{}, {field: value}], [0, 1])
        plain, own = Experiment(**shared).arm, Experiment(**shared, **{field: value}).arm
        added = IN_THE_NAME.get(field, f"{field.replace('_', '-')}-{value}")
        assert study.arms == (plain, own if field in HAS_A_PLACE else f"{plain}_{added}")
        assert (own != plain) == (field in HAS_A_PLACE)
        reversed_arms = make_study("s", shared, [{field: value}, {}], [0]).arms
        assert reversed_arms[0] == own
        assert len(set(reversed_arms)) == 2


def test_arms_that_no_name_can_hold_apart_have_a_digest() -> None:
    numbers = ShapeChanges.model_fields.keys() - {"attention", "qk_norm"}
    layers = ("n_layers", "n_dense_layers")
    shapes = [
        dict.fromkeys(numbers, 10**6 - number) | dict.fromkeys(layers, MOST_LAYERS - number) for number in range(3)
    ]
    arms = make_study("s", {}, [{"shape": shape} for shape in shapes], [0]).arms
    assert len(set(arms)) == 3
    assert max(map(len, arms)) == MAX_ARM_CHARACTERS


@settings(max_examples=50)
@given(one=experiments, other=experiments)
def test_two_arms_of_a_study_have_two_names_that_their_records_keep(
    tmp_path_factory: pytest.TempPathFactory, one: Experiment, other: Experiment
) -> None:
    file = tmp_path_factory.getbasetemp() / "record.yaml"
    fields = [experiment.model_dump(exclude={"name", "seed"}) for experiment in (one, other)]
    if training_of(one) != training_of(other):
        study = make_study("s", {}, fields, [0])
        assert len(study.arms) == 2
        for experiment in study.experiments:
            assert set(experiment.arm) <= set(string.ascii_letters + string.digits + "_-+.")
            file.write_text(write_experiment(experiment))
            assert read_record(file).arm == experiment.arm
    else:
        with pytest.raises(BadInput, match=r"same arm and seed twice|the same training in two arms"):
            make_study("s", {}, fields, [0])


# Records


VERSION = f"{VERSION_KEY}: {max(ADDED_FIELDS)}"


def test_a_record_that_was_cut_off_anywhere_is_refused(file: Path) -> None:
    experiment = Experiment(name="s", precision="mxfp8", seed=3, capture_step=12)
    whole = write_experiment(experiment).encode()
    for end in range(len(whole)):
        file.write_bytes(whole[:end])
        with pytest.raises(BadInput, match="the record"):
            read_record(file)
    file.write_bytes(whole)
    assert read_record(file) == experiment


def test_a_record_has_every_field_and_a_known_version(file: Path) -> None:
    whole = write_experiment(Experiment())
    for changed, told in (
        (whole.replace("seed: 0\n", ""), "the record lacks seed"),
        (whole.replace("steps: 60\n", "").replace("lr: 0.003\n", ""), "the record lacks steps, lr"),
        (whole.replace("seed: 0", "seed: 0\nrouter: 1"), "unknown field 'router'"),
        (whole.replace(VERSION, f"{VERSION_KEY}: 0"), f"{VERSION_KEY}: got 0"),
        (whole.replace(VERSION, f"{VERSION_KEY}: true"), f"{VERSION_KEY}: got True"),
        (whole.replace(VERSION, f"{VERSION_KEY}: 99"), "got 99; valid: 2 to .*, or use the moelab that wrote it"),
        (whole.replace(VERSION, f"{VERSION_KEY}: 1"), f"{VERSION_KEY}: got 1"),  # before moelab 0.2
        (whole.partition("\n")[2], "the record has no version"),
        (whole.replace("seed: 0", "seed: \0"), "the record is not valid YAML"),
        ("- 1\n", "the record has no version"),
    ):
        file.write_text(changed)
        with pytest.raises(BadInput, match=told):
            read_record(file)


def test_a_record_of_moelab_0_2_has_the_values_that_its_runs_had(file: Path) -> None:
    text = write_experiment(Experiment(seed=3)).replace(VERSION, f"{VERSION_KEY}: 2")
    file.write_text(text.replace("accumulate_gradients: false\n", "").replace("validate_every: 0\noverrides: []\n", ""))
    assert read_record(file) == Experiment(seed=3)


def test_a_field_that_a_later_version_adds_has_the_value_that_runs_had_before(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Later(Experiment):
        dropout: float = 0.1

    written_before = write_experiment(Experiment(seed=3))
    monkeypatch.setattr(experiment_file, "Experiment", Later)
    monkeypatch.setattr(experiment_file, "ADDED_FIELDS", {**ADDED_FIELDS, 99: {"dropout": 0.0}})
    file.write_text(written_before)
    assert (read_record(file).model_dump()["dropout"], read_record(file).seed) == (0.0, 3)
    written_now = write_experiment(Later())
    file.write_text(written_now)
    assert read_record(file) == Later()
    file.write_text(written_now.replace("dropout: 0.1\n", ""))
    with pytest.raises(BadInput, match="the record lacks dropout"):
        read_record(file)

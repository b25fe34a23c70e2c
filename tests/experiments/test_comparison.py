"""Comparisons: the data, the same conditions for all schemes, and errors before anything is trained."""

import dataclasses
import json
import math

import pytest
import torch
from transformers import AlbertConfig, GPT2Config
from transformers.activations import ACT2FN

from locant.experiments import arms, comparison
from locant.experiments.presets import SCRATCH, find_preset
from locant.experiments.run import execute, load_setting
from locant.experiments.tasks import find_task
from locant.experiments.tasks.task import order
from locant.experiments.work import Run, Work
from locant.runs import files, run_folder
from locant.runs.budget import Budget

TINY = "quick:length=16,longest=4,batch=4,layers=2,width=16,heads=2,vocabulary=300,evaluated=512"
WORDS = "def f(x):\n    return x + 1  # the same line, again and again, is easy to learn\n" * 400


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(WORDS)
    return str(path)


def begin(out, words, **changes):
    settings = {"task": "clm", "schemes": ["nope"], "data": words, "model": None, "seeds": [0], "preset": TINY,
             "budget": Budget(steps=4), "calibrate": lambda *_: 0.5}  # fmt: skip
    return comparison.begin(out, **{**settings, **changes})


class TestPreset:
    def test_changes_stand_after_a_colon(self):
        made = find_preset("quick:length=64,rate=1e-4", SCRATCH)
        assert (made.length, made.rate, made.batch) == (64, 1e-4, SCRATCH["quick"].batch)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("tiny", "choose one of: quick, small, paper"),
            ("quick:lenght=3", "did you mean 'length'"),
            ("quick:length=x", "must be a whole number"),
            ("quick:length=0", "at least 1"),
            ("quick:rate=0", "at least"),
            ("quick:width=100,heads=3", "not a multiple"),
        ],
    )
    def test_mistakes_have_an_error(self, text, message):
        with pytest.raises(ValueError, match=message):
            find_preset(text, SCRATCH)


class TestBudget:
    def test_time_becomes_steps_once(self, tmp_path, words):
        first = begin(tmp_path, words, budget=Budget(seconds=10), calibrate=lambda *_: 0.5)
        assert first.work.steps == 20
        again = begin(tmp_path, words, budget=Budget(seconds=10), calibrate=lambda *_: pytest.fail("timed again"))
        assert again == first
        with pytest.raises(ValueError, match="another comparison"):
            begin(tmp_path, words, budget=Budget(seconds=20))


class TestSchemes:
    def test_a_comma_before_an_option_belongs_to_the_scheme(self):
        assert arms.specs("tisa,huang4:clip=64,heads=own, nope,native+tisa:kernels=5") == [
            "tisa", "huang4:clip=64,heads=own", "nope", "native+tisa:kernels=5",
        ]  # fmt: skip

    @pytest.mark.parametrize(("text", "message"), [("tisa,,nope", "empty place"), ("tisa,nope,tisa", "twice")])
    def test_mistakes_have_an_error(self, text, message):
        with pytest.raises(ValueError, match=message):
            arms.specs(text)


class TestTheSameForAll:
    def test_the_activation_is_that_of_the_family(self):
        """GPT-2 and ALBERT have `gelu_new`, which transformers computes in eight operations."""
        x = torch.linspace(-6, 6, 101, dtype=torch.float64)
        torch.testing.assert_close(ACT2FN[arms.GELU](x), ACT2FN["gelu_new"](x), rtol=1e-12, atol=1e-14)
        assert (GPT2Config().activation_function, AlbertConfig().hidden_act) == ("gelu_new", "gelu_new")

    def test_weights_agree_wherever_shapes_do(self, tmp_path, words):
        found = begin(tmp_path, words)
        here = load_setting(found.work, tmp_path / comparison.DATA)
        models = {
            spec: arms.build(find_task("clm"), here, "gpt2", spec, seed=3).state_dict()
            for spec in ("native", "nope", "tisa", "huang4:clip=4", "native+alibi", "learned")
        }
        base = models["native"]
        for spec, weights in models.items():
            shared = [name for name in weights if name in base and "wpe" not in name]
            assert len(shared) > 20, spec
            for name in shared:
                assert torch.equal(weights[name], base[name]), (spec, name)
        other = arms.build(find_task("clm"), here, "gpt2", "native", seed=4).state_dict()
        assert not torch.equal(other["transformer.h.0.attn.c_attn.weight"], base["transformer.h.0.attn.c_attn.weight"])

    def test_keeping_the_native_positions_keeps_them(self, tmp_path, words):
        found = begin(tmp_path, words)
        here = load_setting(found.work, tmp_path / comparison.DATA)
        both = arms.build(find_task("clm"), here, "gpt2", "native+tisa", seed=0)
        native = arms.build(find_task("clm"), here, "gpt2", "native", seed=0)
        table = native.transformer.wpe.weight
        assert any(torch.equal(p, table) for p in both.parameters() if p.shape == table.shape)

    def test_a_learned_table_is_as_long_as_the_training(self, tmp_path, words):
        found = begin(tmp_path, words)
        here = load_setting(found.work, tmp_path / comparison.DATA)
        for shape in ("gpt2", "llama"):
            model = arms.build(find_task("clm"), here, shape, "learned", seed=0)
            tests = list(find_task("clm").evaluate(model.eval(), here))
            assert [bool(test.refused) for test in tests] == [False, True, True]
            assert tests[1].refused == "its positions end at 16"

    def test_mapped_schemes_are_arms(self, tmp_path, words):
        specs = "rope@selfextend:window=4,size=2,learned@interpolated:factor=4,alibi:slopes=learned+learned"
        first, second, third = arms.specs(specs)
        assert second == "learned@interpolated:factor=4"
        assert arms._learned(second, 16) == "learned:length=16@interpolated:factor=4"
        assert arms._learned(third, 16) == "alibi:slopes=learned+learned:length=16"  # an option is no table
        found = begin(tmp_path, words)
        here = load_setting(found.work, tmp_path / comparison.DATA)
        for spec, refused in ((first, [False] * 3), (second, [False] * 3), (third, [False, True, True])):
            model = arms.build(find_task("clm"), here, "llama", spec, seed=0)
            tests = list(find_task("clm").evaluate(model.eval(), here))
            assert [bool(test.refused) for test in tests] == refused
        assert Run(found.work, first, 0).name == "rope-selfextend-window=4,size=2.s0"

    def test_examples_depend_on_seed_and_number_alone(self, tmp_path, words):
        for name in ("clm", "mlm"):
            found = begin(tmp_path / name, words, task=name)
            here, job = load_setting(found.work, tmp_path / name / comparison.DATA), find_task(name)
            few, many = job.examples(here, 1, 8), job.examples(here, 1, 200)
            many[150]  # read in another order
            for n in (7, 0, 3):
                assert torch.equal(few[n]["input_ids"], many[n]["input_ids"])
            other = job.examples(here, 2, 8)
            assert any(not torch.equal(few[n]["input_ids"], other[n]["input_ids"]) for n in range(8))

    def test_every_row_is_seen_once_a_round(self):
        seen = order(25, 10, seed=0).tolist()
        assert sorted(seen[:10]) == sorted(seen[10:20]) == list(range(10))
        assert len(set(seen[20:])) == 5
        assert seen[:10] != seen[10:20]


class TestLanguage:
    @pytest.fixture
    def ready(self, tmp_path, words):
        def make(name, shape):
            found = begin(tmp_path, words, task=name, model=shape)
            return find_task(name), load_setting(found.work, tmp_path / comparison.DATA)

        return make

    def test_causal_loss_is_that_of_transformers(self, ready):
        job, here = ready("clm", "gpt2")
        model = arms.build(job, here, "gpt2", "nope", seed=0).eval()
        tests = list(job.evaluate(model, here))
        assert [test.length for test in tests] == [16, 32, 64]
        stream = torch.as_tensor(_stream(here))
        for test in tests:
            rows = stream[: 512 // 64 * 64].view(-1, test.length)
            labels = rows.clone()
            labels[:, ::16] = -100  # first tokens of the shortest windows: the same ones are scored at every length
            with torch.no_grad():
                expected = model(input_ids=rows, labels=labels).loss
            assert test.values["loss"] == pytest.approx(float(expected), rel=1e-5)

    def test_loss_by_position_adds_up_to_the_loss(self, ready):
        job, here = ready("clm", "gpt2")
        model = arms.build(job, here, "gpt2", "alibi", seed=0).eval()
        for test in job.evaluate(model, here):
            places = [at for at, _ in test.by_position]
            assert places == list(range(0, test.length, 2))
            sizes = [1 if at % 16 == 14 else 2 for at in places]  # the first token of a window of 16 is not scored
            mean = math.fsum(size * loss for size, (_, loss) in zip(sizes, test.by_position, strict=True)) / sum(sizes)
            assert mean == pytest.approx(test.values["loss"], rel=1e-6)

    def test_the_same_tokens_are_hidden_at_every_length(self, ready):
        job, here = ready("mlm", "bert")
        stream = torch.as_tensor(_stream(here))[:512].long()
        hidden = []
        for length in (16, 32, 64):
            parts = [job.inputs(here, rows[None], number) for number, rows in enumerate(stream.view(-1, length))]
            hidden.append(torch.cat([labels.flatten() for _, labels in parts]))
        assert torch.equal(hidden[0], hidden[1])
        assert torch.equal(hidden[0], hidden[2])
        share = float((hidden[0] != -100).float().mean())
        assert 0.08 < share < 0.25
        known = hidden[0] != -100
        assert torch.equal(hidden[0][known], stream[known])

    def test_masks_are_those_of_bert(self, ready):
        job, here = ready("mlm", "bert")
        examples = job.examples(here, 0, 400)
        rows = [examples[n] for n in range(400)]
        inputs, labels = (torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels"))
        chosen = labels != -100
        assert 0.13 < chosen.float().mean() < 0.17
        masked = inputs[chosen] == here.tokenizer.mask_token_id
        kept = inputs[chosen] == labels[chosen]
        assert 0.75 < masked.float().mean() < 0.85
        assert 0.06 < kept.float().mean() < 0.14

    @pytest.mark.parametrize("shape", ["gpt2", "llama", "bert", "albert"])
    def test_every_shape_learns(self, ready, tmp_path, shape):
        job, here = ready("clm" if shape in ("gpt2", "llama") else "mlm", shape)
        work = Work(job.name, shape, None, here.preset, 60)
        execute(Run(work, "tisa", 0), tmp_path / "run", here.folder)
        losses = [line["loss"] for line in files.lines(tmp_path / "run" / run_folder.METRICS) if line["kind"] == "step"]
        assert losses[-1] < losses[0] - 1

    def test_a_text_too_short_has_its_size_in_the_error(self, tmp_path):
        (tmp_path / "a.txt").write_text("a few words\n" * 5)
        with pytest.raises(ValueError, match=r"has \d+ tokens to (train|test) on"):
            begin(tmp_path / "out", str(tmp_path / "a.txt"))

    def test_a_preset_that_tests_on_too_little_is_named(self, ready):
        job, here = ready("clm", "gpt2")
        small = dataclasses.replace(here, preset=dataclasses.replace(here.preset, evaluated=3, longest=1000))
        least = 1000 * here.preset.length
        with pytest.raises(ValueError, match=rf"tests on 3 tokens \(evaluated\).*Use evaluated={least} or more"):
            job.prepare(None, small, 4)


def _stream(here):
    from datasets import load_from_disk

    return load_from_disk(str(here.folder / "test"))["token"][:]


class TestFolder:
    def test_more_seeds_and_schemes_may_be_asked_for_later(self, tmp_path, words):
        begin(tmp_path, words)
        grown = begin(tmp_path, words, schemes=["nope", "tisa"], seeds=[0, 1])
        assert grown.schemes == ("nope", "tisa")
        assert len(grown.runs()) == 4
        assert begin(tmp_path, words) == grown

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"budget": Budget(steps=5)}, "steps: 4 there, 5 now"),
            ({"preset": TINY + ",rate=1"}, "another comparison"),
            ({"task": "mlm"}, "another comparison"),
            ({"schemes": ["tisa", "nope"]}, "the first scheme is the baseline"),
        ],
    )
    def test_another_comparison_is_refused(self, tmp_path, words, changes, message):
        begin(tmp_path, words)
        with pytest.raises(ValueError, match=message):
            begin(tmp_path, words, **changes)

    def test_a_folder_from_before_models_were_kept_is_the_same_comparison(self, tmp_path, words):
        made = begin(tmp_path / "out", words)
        path = tmp_path / "out" / "comparison.json"
        content = json.loads(path.read_text())
        del content["work"]["preset"]["kept"]
        path.write_text(json.dumps(content))
        assert comparison.open_folder(tmp_path / "out") == made
        assert begin(tmp_path / "out", words) == made
        with pytest.raises(ValueError, match="kept: 0 there, 2 now"):
            begin(tmp_path / "out", words, preset=TINY + ",kept=2")

    def test_a_folder_with_other_things_is_left_alone(self, tmp_path, words):
        (tmp_path / "thesis.tex").write_text("x")
        with pytest.raises(ValueError, match="contains files that locant did not write"):
            begin(tmp_path, words)
        assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]

    @pytest.mark.parametrize(
        ("schemes", "message"),
        [
            (["nope", "tiza"], "did you mean 'tisa'"),
            (["learned:length=8"], "cannot be trained at 16 tokens: its positions end at 8"),
            (["native+nonsense"], "unknown scheme"),
        ],
    )
    def test_schemes_are_checked_before_anything_is_trained(self, tmp_path, words, schemes, message):
        with pytest.raises(ValueError, match=message):
            begin(tmp_path, words, schemes=schemes)

    def test_a_model_that_does_not_exist(self, tmp_path, words):
        with pytest.raises(ValueError, match="no such shape"):
            begin(tmp_path, words, model="./nowhere")

    def test_what_a_run_leaves(self, tmp_path, words):
        import locant

        found = begin(tmp_path, words, schemes=["tisa"])
        (run,) = found.runs()
        here = comparison.where(tmp_path, run)
        execute(run, here, tmp_path / comparison.DATA)
        assert {"run.json", "metrics.jsonl", "model.safetensors", "DONE", "tokenizer.json"} <= {
            path.name for path in here.iterdir()
        }
        about = json.loads((here / "run.json").read_text())
        assert (about["scheme"], about["seed"], about["task"], about["steps"]) == ("tisa", 0, "clm", 4)
        assert {"versions", "host", "threads", "began"} <= about.keys()
        kept = locant.load(here)
        assert "tisa" in str(locant.native(kept))
        assert kept.config.use_cache  # Trainer turns it off: text would be written in quadratic time
        assert not list(here.glob("checkpoint-*"))
        assert list(comparison.pending(tmp_path, found)) == []

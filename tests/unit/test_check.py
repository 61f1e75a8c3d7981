"""The checker: what it says of published drafters and of a folder of ours; `test_planted_faults.py` has what it must find."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
import torch
from planted import TINY_TARGET, exported
from published import GLM, MUSE, PUBLISHED, QWEN, QWEN_MOE, QWEN_TARGET, V1, headers_of
from safetensors.torch import load_file, save_file

from dflash_train.check import MISREAD, NOTE, REFUSE, RULES, Facts, check, check_facts, main
from dflash_train.drafter.spec import FULL, from_hf_config, to_hf_config
from dflash_train.engines import ENGINES, lines


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_drafters(name):
    config, faults, files = PUBLISHED[name]
    report = check_facts(Facts(config=config, headers=headers_of(config), files=set(files)))
    assert {f.rule for f in report.faults} == faults
    assert report.text().splitlines()[-1] == (
        "No faults." if not faults else f"{len(report.faults)} fault{'s' * (len(report.faults) > 1)}."
    )


@pytest.mark.parametrize(("config", "count"), [(QWEN, 81), (MUSE, 81), (V1, 58)])
def test_published_tensor_counts(config, count):
    assert len(headers_of(config)) == count


def test_published_pair():
    assert check_facts(Facts(config=QWEN, headers=headers_of(QWEN), target=QWEN_TARGET)).faults == []


def test_an_unknown_key_is_noted():
    notes = {f.rule: f.message for f in check_facts(Facts(config=GLM, headers=headers_of(GLM))).findings}
    assert "attention_mode" in notes["unknown keys"]


def test_splash_loads_its_own_shapes_alone():
    def view(config):
        return views(config)["Splash"]

    assert view(QWEN).startswith("block 8") and view(QWEN_MOE).startswith("block 8")
    assert view(MUSE).startswith("not loaded") and "rms_norm_eps" in view(MUSE)
    assert "sliding_window = 1024, not 2048" in view(QWEN | {"sliding_window": 1024})
    f32 = check_facts(Facts(config=QWEN, headers=headers_of(QWEN, "F32"))).views
    assert "not BF16" in "".join(next(v for k, v in f32.items() if k.startswith("Splash")))


LINES = [
    ("python -m sglang.launch_server --speculative-num-draft-tokens 9", {"launch: num-draft-tokens"}),
    ("python -m sglang.launch_server --speculative-num-draft-tokens 8 --speculative-draft-attention-backend fa4", set()),
    ("--speculative-num-draft-tokens=8 --speculative-draft-attention-backend trtllm_mha", {"launch: draft backend"}),
    ("--speculative-num-draft-tokens 8 --attention-backend trtllm_mha", {"launch: draft backend inherited"}),
    ("--speculative-num-draft-tokens 8 --attention-backend trtllm_mha --speculative-draft-attention-backend fa4", set()),
    ("--speculative-dflash-block-size 16", {"launch: dflash-block-size"}),
    ("vllm serve T --speculative-config '{\"method\": \"dflash\", \"model\": \"D\", \"num_speculative_tokens\": 8}'", {"launch: num_speculative_tokens"}),
    ("vllm serve T --speculative-config '{\"num_speculative_tokens\": 7}'", set()),
    ("VLLM_USE_V2_MODEL_RUNNER=0 vllm serve T", {"launch: V1 runner"}),
    ('DFlashDecodingConfig(max_draft_len=7, speculative_model="D", attention_backend="TRTLLM")', {"launch: TRTLLM backend"}),
    ("speculative_config:\n  decoding_type: DFlash\n  max_draft_len: 8\n", {"launch: max_draft_len"}),
    ("FROM T\nDRAFT D\n", {"launch: no draft depth"}),
    ("FROM T\nDRAFT D\nPARAMETER draft_num_predict 0\n", {"launch: draft_num_predict off"}),
    ("FROM T\nDRAFT D\nPARAMETER draft_num_predict 7\n", set()),
    ("llama-server -m t.gguf -md d.gguf --spec-type draft-dflash --spec-draft-n-max 8 -np 4", set()),
    ("dflash generate mlx --block-size 9", {"launch: block-size"}),
    ("sglang serve --speculative-algorithm EAGLE3 --speculative-num-draft-tokens 8", {"launch: speculative-algorithm"}),
    ("sglang serve --speculative-algorithm=dflash --speculative-num-draft-tokens 8", set()),
    ('vllm serve T --speculative-config \'{"method": "eagle3", "num_speculative_tokens": 7}\'', {"launch: method"}),
    ('env:\n  VLLM_USE_V2_MODEL_RUNNER: "0"\n', {"launch: V1 runner"}),
    ("speculative_config:\n  decoding_type: Eagle\n  max_draft_len: 7\n", {"launch: decoding_type"}),
    ("llama-server -m t.gguf -md d.gguf --spec-type draft-mtp", {"launch: spec-type"}),
]  # fmt: skip


@pytest.mark.parametrize(("line", "faults"), LINES, ids=range(len(LINES)))
def test_launch_lines(line, faults):
    assert {f.rule for f in check_facts(Facts(config=QWEN), line).faults if f.rule.startswith("launch")} == faults


def test_launch_lines_that_are_only_noted():
    def notes(line, target=None):
        found = check_facts(Facts(config=QWEN, target=target), line).findings
        return {f.rule for f in found if f.rule.startswith("launch") and f.severity == NOTE}

    line = "llama-server -md d.gguf --spec-type draft-dflash --spec-draft-n-max 8 -np 4"
    assert notes(line) == {"launch: spec-draft-n-max", "launch: parallel slots"}
    assert notes("vllm serve T --speculative-config '{\"num_speculative_tokens\": 7}'") == {
        "launch: V2 runner not named"
    }
    assert (
        notes("VLLM_USE_V2_MODEL_RUNNER=1 vllm serve T --speculative-config '{\"num_speculative_tokens\": 7}'") == set()
    )
    assert notes("docker run something else") == {"launch: nothing known"}
    assert notes("--speculative-num-draft-tokens 7") == {"launch: num-draft-tokens low"}
    hybrid = "--linear-attn-prefill-backend triton"
    assert notes(hybrid, QWEN_TARGET) == set()
    assert notes(hybrid, replace(QWEN_TARGET, model_type="qwen3")) == {"launch: linear-attention flags"}


def test_a_causal_or_full_drafter_may_use_any_backend():
    line = "--speculative-draft-attention-backend trtllm_mha attention_backend: TRTLLM"
    full = QWEN | {"layer_types": [FULL] * 5, "sliding_window": None, "use_sliding_window": False}
    for config in (QWEN | {"is_causal": True}, full):
        assert not [f for f in check_facts(Facts(config=config), line).faults if f.rule.startswith("launch")]
        assert "fa4" not in "".join(check_facts(Facts(config=config)).settings["SGLang"])


def test_own_config_passes():
    config = to_hf_config(from_hf_config(QWEN), dtype="bfloat16", bos=None, eos=248044, pad=248044)
    assert check_facts(Facts(config=config, headers=headers_of(config), target=QWEN_TARGET)).faults == []


def views(config):
    return {
        k.split()[0]: "\n".join(v)
        for k, v in check_facts(Facts(config=config, headers=headers_of(config))).views.items()
    }


def test_views_differ_where_the_engines_do():
    config = copy.deepcopy(QWEN)
    del config["is_causal"]
    config["block_size"] = 16
    config["partial_rotary_factor"] = 0.25
    v = views(config)
    assert "window 2048, causal in the block" in v["SGLang"]
    assert "window 2048, bidirectional in the block" in v["llama.cpp"]
    assert (
        v["exllamav3"].startswith("block 16")
        and v["SGLang"].startswith("block 8")
        and v["vLLM"].startswith("block not read")
    )
    assert "over 0.25 of the head" in v["vLLM"] and "of the head" not in v["reference"]
    assert "num_speculative_tokens 7" in v["vLLM"] and "--speculative-num-draft-tokens 8" in v["SGLang"]

    config = copy.deepcopy(QWEN) | {"use_sliding_window": False}
    v = views(config)
    assert "refused" in v["vLLM"] and "full attention" in v["llama.cpp"] and "window 2048" in v["MLX"]


def test_rules_are_well_formed():
    assert {r.severity for r in RULES} == {REFUSE, MISREAD, NOTE}
    assert len({r.name for r in RULES}) == len(RULES)
    assert all(r.engines and r.message and r.source for r in RULES)


@pytest.fixture
def folder(tmp_path):
    return exported(tmp_path / "out")


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder, **changes):
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | changes, folder / "model.safetensors", metadata={"format": "pt"})


OTHER = "training record, weights"  # of an export whose tensors somebody changed


def rules(report):
    return {f.rule for f in report.faults}


def test_own_export_passes(folder, capsys):
    assert check(folder, TINY_TARGET).faults == []
    assert main([str(folder)]) == 0
    assert "No faults." in capsys.readouterr().out


def test_fresh_drafter_is_only_noted(folder):
    base = torch.zeros(2, 2, 64, dtype=torch.bfloat16)
    base[:, 0] = 1
    edit_tensors(folder, **{
        "layers.0.mlp_conv.base_kernel": base,
        "layers.0.mlp_conv.kernel_projection.weight": torch.zeros(16, 64, dtype=torch.bfloat16),
        "candidate_selector.successor_codebook": torch.zeros(160, 8, dtype=torch.bfloat16),
    })  # fmt: skip
    report = check(folder)
    assert rules(report) == {OTHER}
    note = next(f for f in report.findings if f.rule == "fresh parts")
    assert "base_kernel" in note.message and "successor_codebook" in note.message


@pytest.mark.parametrize(
    ("value", "rule"), [(float("nan"), "not finite"), (float("inf"), "not finite"), (0.0, "all zero")]
)
def test_tensor_values(folder, value, rule):
    edit_tensors(folder, **{"layers.1.mlp.down_proj.weight": torch.full((64, 96), value, dtype=torch.bfloat16)})
    assert rules(check(folder)) == {rule, OTHER}


def test_training_record(folder):
    config = json.loads((folder / "config.json").read_text())
    edit_config(folder, dflash_config=config["dflash_config"] | {"target_layer_ids": [1, 3]})
    report = check(folder)
    assert rules(report) == {"training record"}
    assert "[0, 2]" in report.text() and "[1, 3]" in report.text()


def test_tokenizer_rules(folder):
    data = {
        "model": {"vocab": {"a": 5}},
        "added_tokens": [{"content": "<|MASK|>", "id": 151}, {"content": "<eos>", "id": 150}],
    }
    (folder / "tokenizer.json").write_text(json.dumps(data))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<eos>"}}))
    assert rules(check(folder)) == {"mask string", "mask special"}


def test_malformed_values(folder, capsys):
    edit_config(folder, sliding_window="2048", layer_types="sliding_attention", dflash_config={"block_size": "8"})
    report = check(folder)
    assert rules(report) == {"types"}
    assert all(k in report.text() for k in ("sliding_window", "layer_types", "dflash_config.block_size"))
    assert main([str(folder)]) == 1


def test_broken_files(folder, tmp_path, capsys):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    assert "weights" in rules(check(folder))
    path.unlink()
    assert "weights" in rules(check(folder))
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "config.json" in capsys.readouterr().err


def test_a_launch_file_that_is_not_there_is_no_launch_line(tmp_path, capsys):
    folder = exported(tmp_path / "out")
    assert main([str(folder), "--launch", str(tmp_path / "serve.sh")]) == 2
    assert "serve.sh: no such file" in capsys.readouterr().err


def test_every_launch_line_of_ours_passes():
    """What a card says to run has no flag that the table calls a contradiction, of any drafter."""
    for config in (QWEN, MUSE, V1):
        facts = Facts(config=config)
        for engine in ENGINES:
            for _, text in lines(engine, facts.serving()):
                found = [f for f in check_facts(facts, text).faults if f.rule.startswith("launch")]
                assert found == [] or (engine.name == "ollama" and "DRAFT" not in text), (engine.name, found)

"""The ways a step can be computed: FSDP2, 16 bits, layouts, gradient checkpointing; and memory that runs out."""

import shutil
import types

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402
from training_rows import LORA, ids_of, message, random_rows, whole  # noqa: E402
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM  # noqa: E402

from aglite.errors import AgliteError, EngineError  # noqa: E402
from aglite.worker import gpu_memory, memory, verl_world  # noqa: E402
from aglite.worker.model_inputs import Layout, model_inputs  # noqa: E402
from aglite.worker.trainer import Trainer  # noqa: E402
from aglite.worker.verl_worker import CpuEngine  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = random_rows(31)
IDS = ids_of(ROWS)
PLAN = whole(ROWS)


@pytest.fixture
def wrapped(monkeypatch):
    monkeypatch.setattr(CpuEngine, "wrapped", True)


@pytest.fixture(scope="module")
def usual(tiny_model, one_thread):
    """What a step of the usual trainer gives: (log-probabilities before, result, weights after)."""
    return step(Trainer(tiny_model, lr=1e-3, tokens_per_micro_batch=60))


def step(trainer, **changes):
    before = trainer.logprobs(IDS, 0.7)
    result = trainer.train(message(ROWS, before, PLAN, **changes))
    return before, result, {name: weight.clone() for name, weight in trainer.weights()}


def flat(values):
    return torch.cat([torch.tensor(one) for one in values])


def assert_same(one, two, lr=1e-3, rel=1e-5):
    assert (flat(one[0]) - flat(two[0])).abs().max() < 5e-5
    for key in ("loss", "grad_norm", "entropy"):
        assert one[1][key] == pytest.approx(two[1][key], rel=rel, abs=1e-6), key
    for name, weight in one[2].items():
        # Not each weight: one whose gradient is rounding error alone moves by any part of lr, whichever way.
        assert (weight - two[2][name]).square().mean().sqrt() < 0.01 * lr, name


def test_a_model_wrapped_in_fsdp2_trains_the_same(make_trainer, usual, wrapped, tmp_path):
    trainer = make_trainer()
    assert type(trainer.module).__name__.startswith("FSDP")
    found = step(trainer)
    assert_same(found, usual)
    assert all(type(weight) is torch.Tensor for weight in found[2].values())
    now = trainer.logprobs(IDS, 0.7)
    assert all(torch.equal(weight, found[2][name]) for name, weight in trainer.weights())
    assert now != found[0]
    trainer.save(tmp_path / "step-1", {"step": 1})
    batch = message(ROWS, found[0], PLAN)
    expected = [trainer.train(batch)["grad_norm"], trainer.train(batch)["grad_norm"]]
    other = make_trainer(seed=9)
    other.load(tmp_path / "step-1")
    assert [other.train(batch)["grad_norm"], other.train(batch)["grad_norm"]] == expected
    CpuEngine.wrapped = False
    plain = make_trainer()
    plain.load(tmp_path / "step-1")
    assert plain.train(batch)["grad_norm"] == pytest.approx(expected[0], rel=1e-5)


def test_an_adapter_wrapped_in_fsdp2_trains_the_same(make_trainer, wrapped, tmp_path):
    trainer = make_trainer(lora=LORA, kl=0.1)
    found = step(trainer, kl=0.1)
    trainer.save(tmp_path / "step-1", {})
    now = trainer.logprobs(IDS, 0.7)
    other = make_trainer(lora=LORA, kl=0.1, seed=9)
    other.load(tmp_path / "step-1")
    assert other.logprobs(IDS, 0.7) == now
    CpuEngine.wrapped = False
    assert_same(found, step(make_trainer(lora=LORA, kl=0.1), kl=0.1))
    merged = Trainer(tmp_path / "step-1")
    assert (flat(merged.logprobs(IDS, 0.7)) - flat(now)).abs().max() < 5e-5


@pytest.mark.parametrize("how", ["autocast", "fsdp2"])
def test_16_bits_come_close_and_the_weights_keep_32(make_trainer, usual, how, monkeypatch):
    monkeypatch.setattr(CpuEngine, "wrapped", how == "fsdp2")
    trainer = make_trainer(dtype="bfloat16", kl=0.1)
    before, result, weights = step(trainer, kl=0.1)
    gaps = (flat(before) - flat(usual[0])).abs()
    assert 1e-4 < gaps.mean() < 0.1
    assert result["grad_norm"] == pytest.approx(usual[1]["grad_norm"], rel=0.1)
    assert result["kl_ref"] == pytest.approx(0, abs=1e-2)  # half the square of such gaps, where the two round apart
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert {value.dtype for state in trainer.optimizer.state.values() for value in state.values()} == {torch.float32}
    moved = torch.cat([(weights[name] - value).flatten() for name, value in usual[2].items()]).abs()
    assert moved.max() < 2.1e-3 and moved.mean() < 5e-4


def test_an_adapter_keeps_32_bits_beside_weights_of_16(make_trainer, wrapped, tmp_path):
    """As on a GPU, where weights that nobody updates are held in the type that is computed in."""
    trainer = make_trainer(lora=LORA, dtype="bfloat16")
    kinds = {parameter.requires_grad: parameter.dtype for parameter in trainer.module.parameters()}
    assert kinds == {True: torch.float32, False: torch.bfloat16}
    before, result, weights = step(trainer)
    assert result["applied"] and {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    trainer.save(tmp_path / "step-1", {})
    expected = trainer.train(message(ROWS, before, PLAN))["grad_norm"]
    other = make_trainer(lora=LORA, dtype="bfloat16", seed=9)
    other.load(tmp_path / "step-1")
    assert {name: weight.dtype for name, weight in other.weights()} == {name: torch.bfloat16 for name in weights}
    assert other.train(message(ROWS, before, PLAN))["grad_norm"] == expected
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "step-1")
    assert model.dtype == torch.bfloat16
    assert all(torch.equal(weights[name], value) for name, value in model.named_parameters())


def test_gradient_checkpointing_changes_nothing_but_memory(make_trainer, usual):
    trainer = make_trainer(gradient_checkpointing=True)
    assert_same(step(trainer), usual)
    how = (Layout(), torch.float32)
    less, more = memory.pass_bytes(trainer.module, *how), memory.pass_bytes(make_trainer().module, *how)
    assert 3 * 64 * 4 * 100 < less(100, 0) < 0.6 * more(100, 0) and trainer.module.is_gradient_checkpointing


@pytest.mark.parametrize("lora", [None, LORA], ids=["all", "adapter"])
def test_rows_that_follow_each_other_give_what_a_forest_gives(make_trainer, lora):
    """With the lengths that flash attention is given, which sdpa leaves alone."""
    usual, trainer = step(make_trainer(lora=lora)), make_trainer(lora=lora)
    trainer._layout = trainer._worker.engine.layout = Layout(shared=False, lengths=True)
    found = step(trainer)
    assert_same(found, usual)
    assert found[1]["computed_tokens"] == sum(map(len, IDS)) > usual[1]["computed_tokens"]
    assert found[1]["micro_batch_tokens_max"] <= 60


def test_flash_attention_is_given_the_lengths_of_the_rows():
    rows = torch.nested.nested_tensor([torch.arange(3, 8), torch.arange(3, 6)], layout=torch.jagged)
    trained = torch.tensor([[0, 1, 0, 1], [0, 1, 0, 0]])
    inputs, outputs = model_inputs(rows, trained, 1.0, Layout(shared=False, lengths=True))
    assert inputs["input_ids"].tolist() == [[3, 4, 5, 6, 7, 3, 4, 5]] and inputs["attention_mask"] is None
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    for side in ("q", "k"):
        assert inputs[f"cu_seq_lens_{side}"].tolist() == [0, 5, 8] and inputs[f"max_length_{side}"] == 5
    assert inputs["logits_to_keep"].tolist() == [1, 3, 6] and outputs["labels"].tolist() == [5, 7, 5]


def assert_exact(folder, layout, kind=AutoModelForCausalLM):
    """Log-probabilities of packed rows are those of each row alone."""
    trainer = Trainer(folder, tokens_per_micro_batch=200)
    assert trainer._layout == layout
    model = kind.from_pretrained(folder, dtype=torch.float32)
    expected = []
    for ids in IDS:
        with torch.no_grad():
            logits = model(torch.tensor([ids]), use_cache=False).logits[0, :-1] / 0.7
        expected.append(logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist())
    assert (flat(trainer.logprobs(IDS, 0.7)) - flat(expected)).abs().max() < 5e-5
    result = step(trainer)[1]
    assert result["applied"]
    return result


SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
}


def test_a_sliding_window_is_kept(tmp_path):
    torch.manual_seed(0)
    config = MistralConfig(**SIZES, num_hidden_layers=2, sliding_window=5, attn_implementation="sdpa")
    MistralForCausalLM(config).save_pretrained(tmp_path)
    assert assert_exact(tmp_path, Layout(shared=False))["micro_batches"] == 1


LINEAR = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}


@pytest.mark.parametrize("sees", [False, True], ids=["text", "vision"])
def test_a_state_along_the_sequence_is_not_carried_from_row_to_row(tmp_path, sees):
    """Qwen3.5, whose published models have a vision part, too; it is left as it is."""
    from transformers import Qwen3_5Config, Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration, Qwen3_5TextConfig

    torch.manual_seed(0)
    text = {**SIZES, **LINEAR, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    if sees:
        model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=VISION))
    else:
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**text))
    model.save_pretrained(tmp_path)
    result = assert_exact(tmp_path, Layout(shared=False, alone=True), type(model))
    assert result["micro_batches"] == len(ROWS)
    adapter = Trainer(tmp_path, lora=LORA)
    names = [name for name, parameter in adapter.module.named_parameters() if parameter.requires_grad]
    assert any("linear_attn" in name for name in names) and not any("visual" in name for name in names)
    assert step(adapter)[1]["applied"]
    adapter.export(tmp_path / "out")
    again = type(model).from_pretrained(tmp_path / "out")
    ours = dict(adapter.weights())
    assert all(torch.equal(ours[name], value) for name, value in again.named_parameters())


def test_weights_in_host_memory_are_not_trained(make_trainer, usual):
    trainer = make_trainer()
    batch = message(ROWS, usual[0], PLAN)
    trainer.offload()
    for call in (lambda: trainer.train(batch), lambda: trainer.logprobs(IDS, 0.7)):
        with pytest.raises(EngineError, match="host memory") as refusal:
            call()
        assert "onload" in refusal.value.mend
    assert len(dict(trainer.weights())) == len(usual[2])
    trainer.onload()
    assert trainer.train(batch)["grad_norm"] == usual[1]["grad_norm"]


HELD = gpu_memory.Holders(80 << 30, 6 << 30, 6 << 30, 12 << 30, 40 << 30, [("vllm (process 7)", 9 << 30)])


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(gpu_memory, "holders", lambda parameters, optimizer: HELD)


def fails_above(trainer, monkeypatch, tokens):
    """Let passes of more than `tokens` tokens run out of memory, in the middle of the step."""
    passes, real = [], trainer._worker.forward_backward

    def forward_backward(data):
        passes.append(len(data["input_ids"].values()))
        if len(passes) > 1 and passes[-1] > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(data)

    monkeypatch.setattr(trainer._worker, "forward_backward", forward_backward)
    return passes


def test_a_step_without_memory_is_tried_again_in_smaller_pieces(make_trainer, usual, gpu, monkeypatch, capsys):
    trainer = make_trainer(tokens_per_micro_batch=100)
    trainer.logprobs(IDS, 0.7)
    fails_above(trainer, monkeypatch, 60)
    found = step(trainer)
    assert_same(found, usual)
    assert found[1]["trained_tokens"] == usual[1]["trained_tokens"] and trainer._budget < 60
    assert found[1]["logprob_gap_tokens"] == usual[1]["logprob_gap_tokens"]
    assert "trying again" in capsys.readouterr().out


@pytest.mark.parametrize("wrap", [False, True], ids=["plain", "fsdp2"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_pass_may_fail_anywhere(make_trainer, usual, gpu, monkeypatch, where, wrap):
    monkeypatch.setattr(CpuEngine, "wrapped", wrap)
    trainer = make_trainer()
    monkeypatch.setattr(trainer, "_check_memory", lambda *_: 0)  # as on a GPU
    layer, passes = trainer.module.model.layers[1], []

    def fail(*_):
        passes.append(where)
        if len(passes) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    before = trainer.logprobs(IDS, 0.7)
    hook = layer.register_forward_pre_hook(fail) if where == "forward" else layer.register_full_backward_hook(fail)
    result = trainer.train(message(ROWS, before, PLAN))
    hook.remove()
    assert len(passes) == 2 + result["micro_batches"] and result["updates"] == 1
    assert_same((before, result, dict(trainer.weights())), usual)


def test_memory_that_runs_out_is_explained_and_nothing_is_half_done(make_trainer, usual, gpu, monkeypatch):
    trainer = make_trainer()
    batch = message(ROWS, usual[0], PLAN)
    start = {name: weight.clone() for name, weight in trainer.weights()}
    with monkeypatch.context() as patch:
        fails_above(trainer, patch, 0)
        with pytest.raises(AgliteError) as refusal:
            trainer.train(batch)
    message_, mend = refusal.value.message, refusal.value.mend
    assert "weights 6.0 GiB, gradients 6.0 GiB, optimizer 12.0 GiB" in message_
    assert "activations and logits 40.0 GiB, vllm (process 7) 9.0 GiB" in message_
    for setting in ("engine.context_length", "gradient_checkpointing", "offload_optimizer", "gpu_memory_utilization"):
        assert setting in mend
    with monkeypatch.context() as patch:
        patch.setattr(trainer.optimizer, "step", lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA")))
        with pytest.raises(AgliteError, match="while the optimizer was applied") as refusal:
            trainer.train(batch)
        assert "tokens_per_micro_batch" not in refusal.value.mend
    assert all(torch.equal(start[name], weight) for name, weight in trainer.weights())
    assert not any(parameter.grad is not None for parameter in trainer.module.parameters())
    assert trainer.train(batch)["grad_norm"] == pytest.approx(usual[1]["grad_norm"], rel=1e-5)


def test_who_holds_a_gpu(monkeypatch):
    """What torch and the driver say, put together; the driver may know of no processes in a container."""
    import pynvml

    cuda = {
        "mem_get_info": lambda: (2 << 30, 80 << 30),
        "max_memory_allocated": lambda: 50 << 30,
        "memory_reserved": lambda: 52 << 30,
        "current_device": lambda: 0,
        "get_device_properties": lambda device: types.SimpleNamespace(uuid="abc"),
    }
    for name, function in cuda.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(gpu_memory, "_on_gpu", lambda tensors: sum(tensor.numel() for tensor in tensors) << 20)
    one = torch.nn.Parameter(torch.zeros(1024))
    optimizer = torch.optim.AdamW([one])
    one.grad = torch.zeros(1024)
    running = [
        types.SimpleNamespace(pid=1, usedGpuMemory=5 << 30),
        types.SimpleNamespace(pid=2**30, usedGpuMemory=None),
    ]
    monkeypatch.setattr("aglite.gpus._nvml", None)  # nobody has looked for a driver yet
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: uuid)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", lambda handle: running)
    held = gpu_memory.holders([one], optimizer)
    assert (held.total, held.weights, held.gradients, held.optimizer) == (80 << 30, 1 << 30, 1 << 30, 0)
    assert held.rest == 48 << 30 and [count for _, count in held.others] == [5 << 30, 0]
    assert held.others[0][0].endswith(" (process 1)") and held.others[1][0] == f"process {2**30}"
    running.clear()
    assert gpu_memory.holders([one], optimizer).others == [("everything outside this process", 26 << 30)]


def test_a_gpu_that_is_not_there_is_named():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert verl_world.resolve_device("auto") == verl_world.resolve_device("cpu") == "cpu"
    with pytest.raises(AgliteError, match=r"trainer\.device is cuda") as refusal:
        verl_world.resolve_device("cuda")
    assert "extra `gpu`" in refusal.value.mend


def without(tensors):
    del tensors["model.layers.1.mlp.up_proj.weight"]


def narrowed(tensors):
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:32].clone()


@pytest.mark.parametrize(
    "harm, said",
    [
        (without, "1 tensors of LlamaForCausalLM are missing, such as model.layers.1.mlp.up_proj.weight"),
        (narrowed, r"tensor model.norm.weight is \[32\], and LlamaForCausalLM expects \[64\]"),
    ],
)
def test_weights_that_are_not_whole_are_refused_and_never_made_up(tiny_model, tmp_path, harm, said):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    tensors = load_file(folder / "model.safetensors")
    harm(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(AgliteError, match=said) as caught:
        Trainer(folder, lr=1e-3, tokens_per_micro_batch=60)
    assert str(folder) in caught.value.message and "config.json" in caught.value.mend
    AutoModelForCausalLM.from_pretrained(tiny_model)  # as it was, for whoever else loads one


def test_flash_attention_without_a_gpu_is_refused(make_trainer):
    with pytest.raises(AgliteError, match=r"trainer\.attention is flash_attention_2"):
        make_trainer(attention="flash_attention_2")

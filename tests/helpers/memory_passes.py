"""A pass as a trainer makes it, with the classes of `transformers`: model, inputs, losses."""


def model_of(config, dtype, checkpointing=False):
    from transformers import AutoConfig, AutoModelForCausalLM

    made = AutoConfig.for_model(**config)
    model = AutoModelForCausalLM.from_config(made, attn_implementation="sdpa", dtype=dtype).train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def inputs(tokens, logits, masked):
    import torch

    given = {
        "input_ids": torch.zeros(1, tokens, dtype=torch.long),
        "position_ids": torch.arange(tokens)[None],
        "logits_to_keep": torch.arange(logits),
        "use_cache": False,
    }
    if masked:
        given["attention_mask"] = torch.ones(1, 1, tokens, tokens, dtype=torch.bool).tril()
    return given


def losses(model, given):
    """The loss that a trainer makes of its logits, and the entropy, which it measures without a gradient."""
    import torch

    scores = model(**given).logits[0].float()
    rows = torch.arange(len(given["logits_to_keep"]))
    normalizer = scores.logsumexp(-1)
    chosen = scores[rows, rows] - normalizer
    with torch.no_grad():
        (scores - normalizer[:, None]).exp_().mul_(scores).sum(-1)
    return -chosen.sum()

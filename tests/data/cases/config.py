"""Values of the JSON key, and messages about them."""

WRONG = [
    # (value of the key, regex of the message)
    (8, r'"context_parallel" is 8, but it must be an object such as \{"size": 8\}'),
    ({"sise": 8}, r'"context_parallel.sise" is not a key of ds_cp. Did you mean "size"\? Known keys: size, method'),
    ({"enabled": True, "size": 8}, r'"context_parallel.enabled" is not a key of ds_cp. There is no switch: a "size" above 1 is on'),
    ({"size": 0}, r'"context_parallel.size" is 0; allowed: "auto" or a whole number from 1'),
    ({"size": -2}, r'"context_parallel.size" is -2'),
    ({"size": 2.0}, r'"context_parallel.size" is 2.0'),
    ({"size": True}, r'"context_parallel.size" is true'),
    ({"size": "8"}, r'"context_parallel.size" is "8"'),
    ({"method": "rings"}, r'"context_parallel.method" is "rings". Did you mean "ring"\? Allowed: "auto", "ulysses", "ring"'),
    ({"layout": "zig-zag"}, r'Did you mean "zigzag"'),
    ({"kernel": "flash"}, r'"context_parallel.kernel" is "flash"'),
    ({"checks": True}, r'"context_parallel.checks" is true. Allowed: "first_step"'),
    ({"timeout": 0}, r'"context_parallel.timeout" is 0: input should be greater than 0'),
    ({"timeout": "long"}, r'"context_parallel.timeout" is "long"'),
    ({"timeout": True}, r'"context_parallel.timeout" is true: input should be a valid number'),
    ({"timeout": "5"}, r'"context_parallel.timeout" is "5"'),
    ({"timeout": float("inf")}, r'"context_parallel.timeout" is Infinity: input should be a finite number'),
    ({"offload_kv": 0}, r'"context_parallel.offload_kv" is 0; allowed: "auto", true, false or a whole number from 1'),
    ({"offload_kv": "on"}, r'"context_parallel.offload_kv" is "on"; allowed: "auto", true, false or'),
    ({8: "size"}, r'"context_parallel" has a key 8, which is no name'),
    ({"unverified": "yes"}, r'Allowed: "refuse", "allow"'),
    ({"ulysses_size": 1.5}, r'"context_parallel.ulysses_size" is 1.5'),
    ({"recompute_attention": "yes"}, r'"context_parallel.recompute_attention" is "yes". Allowed: false, true'),
    ({"tiled_loss": "True"}, r'"context_parallel.tiled_loss" is "True". Did you mean "true"\? Allowed: "auto", true, false'),
    ({"offload_activations": "cpu"}, r'"context_parallel.offload_activations" is "cpu". Allowed: "auto", true, false'),
    ({"size": 3}, r"8 ranks and 3 does not divide 8: .* Legal sizes here: 1, 2, 4, 8\."),
    ({"size": 16}, r"Legal sizes here: 1, 2, 4, 8"),
    ({"size": 8, "ulysses_size": 3}, r'"context_parallel.ulysses_size" is 3, but it must divide .* Legal values here: 1, 2, 4, 8'),
]  # fmt: skip


UNREAD = {
    # config: the name that is refused
    '{"contex_parallel": {"size": 2}}': "contex_parallel",
    '{"contextParallel": {"size": 2}}': "contextParallel",
    '{"context-parallel": 2}': "context-parallel",
    '{"context_parallel_size": 2}': "context_parallel_size",
    '{"ctx_parallel": 2}': "ctx_parallel",
    '{"context_parallel": {"size": 2}, "context_paralel": {"size": 4}}': "context_paralel",
    '{"zero_optimization": {"stage": 2, "context_parallel": {"size": 2}}}': "zero_optimization.context_parallel",
    '{"optimizer": {"type": "Adam", "params": {"context_parallel": 2}}}': "optimizer.params.context_parallel",
}

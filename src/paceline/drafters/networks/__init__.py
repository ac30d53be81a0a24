"""Parts of drafters with a network of their own: the target's weights, KV, tensors, graph nodes.

`dflash` and `mtp` consist of these. `target` has the embeddings and the head that a drafter shares
with its target, `tensors` reads checkpoints, `context` is the KV cache of one sequence, `nodes`
builds OpenVINO graphs, and `mlx` has what networks in MLX share.
"""

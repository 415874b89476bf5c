"""A user of the public `tinker` package who asks for many steps at once: `URL PAIRS TOKENS`; tells the losses."""

from __future__ import annotations

import json
import sys

import tinker
from tinker import types

url, pairs, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
client = tinker.ServiceClient(base_url=url, api_key="tml-test").create_lora_training_client("stub/model", rank=8)
datum = types.Datum(
    model_input=types.ModelInput.from_ints([1] * tokens),
    loss_fn_inputs={"target_tokens": [3] * tokens, "weights": [1.0] * tokens},
)
adam = types.AdamParams(learning_rate=1e-4)
futures = [(client.forward_backward([datum], "cross_entropy"), client.optim_step(adam)) for _ in range(pairs)]
losses = [forward_backward.result().metrics["loss:sum"] for forward_backward, _ in futures]
futures[-1][1].result()
print(json.dumps(losses))

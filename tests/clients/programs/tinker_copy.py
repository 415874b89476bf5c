"""What a copy of a sampling client samples in another process; it comes pickled on standard input."""

import json
import os
import pickle
import sys

import tinker
from tinker_session import sampled

if __name__ == "__main__":
    copies = pickle.load(sys.stdin.buffer)
    by_handle = tinker.SamplingClient.from_sampler_handle(copies["handle"])
    print(json.dumps({"pickled": sampled(copies["client"], 2, seed=7), "by_handle": sampled(by_handle, 2, seed=7)}))
    sys.stdout.flush()
    os._exit(0)

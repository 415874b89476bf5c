"""What our backend for kubeflow's own client hands on: every type and option of theirs as ours, and what comes back."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from case_programs import ROOT, kubeflow_python

from patience import PATIENCE_S

THERE_AND_BACK = """
from kubeflow import trainer as theirs
from kubeflow.trainer import options as their_options
from trainmaster.trainer import kubeflow, options, types

patch = their_options.TrainingRuntimeSpecPatch(template=their_options.JobSetTemplatePatch(
    spec=their_options.JobSetSpecPatch(replicated_jobs=[their_options.ReplicatedJobPatch(name="node")])))
given = [
    theirs.BuiltinTrainer(config=theirs.TorchTuneConfig(
        dtype=theirs.DataType.BF16, loss=theirs.Loss.CEWithChunkedOutputLoss, num_nodes=2,
        peft_config=theirs.LoraConfig(lora_rank=4, use_dora=False),
        dataset_preprocess_config=theirs.TorchTuneInstructDataset(source=theirs.DataFormat.CSV))),
    theirs.CustomTrainer(func=print, func_args={"a": 1}, packages_to_install=["b"], resources_per_node={"cpu": 1}),
    theirs.CustomTrainerContainer(image="c", num_nodes=2, env={"d": "e"}),
    theirs.Initializer(
        dataset=theirs.DataCacheInitializer("cache://a/b", metadata_loc="c", num_data_nodes=3, head_cpu="1"),
        model=theirs.S3ModelInitializer("s3://a/b", region="c", secret_access_key="d")),
    theirs.Initializer(
        dataset=theirs.HuggingFaceDatasetInitializer("hf://a/b", access_token="c"),
        model=theirs.HuggingFaceModelInitializer("hf://a/b")),
    theirs.Runtime(
        "a", theirs.RuntimeTrainer(theirs.TrainerType.CUSTOM_TRAINER, "torch", "b", num_nodes=2, device="gpu"),
        theirs.RuntimeKind.CLUSTER_TRAINING_RUNTIME, pretrained_model="c"),
]
given[-1].trainer.set_command(("torchrun",))
for value in given:
    ours = kubeflow._ours(value)
    assert type(ours) is getattr(types, type(value).__name__), ours
    assert kubeflow._theirs(ours) == value, (ours, value)
asked = [
    their_options.Name("a"), their_options.Labels({"a": "b"}), their_options.Annotations({"a": "b"}),
    their_options.ActiveDeadlineSeconds(5), their_options.TrainerCommand(["a"]), their_options.TrainerArgs(["a"]),
    their_options.RuntimePatch(training_runtime_spec=patch),
]
for value in asked:
    ours = kubeflow._converted(value, options)
    assert type(ours) is getattr(options, type(value).__name__), ours
    assert kubeflow._converted(ours, their_options) == value, (ours, value)
runtime = types.Runtime(
    "a", types.RuntimeTrainer(types.TrainerType.CUSTOM_TRAINER, "torch", "b"), types.RuntimeKind.TRAINING_RUNTIME)
assert kubeflow._theirs(runtime) == kubeflow._theirs(runtime)
queue = options.Queue("a")
assert kubeflow._converted(queue, options) is queue and kubeflow._converted(print, options) is print
"""


def test_types_and_options_of_kubeflow_are_ours_there_and_theirs_again(tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [kubeflow_python(), "-c", THERE_AND_BACK], env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr

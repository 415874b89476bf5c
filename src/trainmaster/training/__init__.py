"""Built-in trainers: what runs in each rank of a job that names a training type instead of a program.

`python -m trainmaster.training` is one rank. The loops are TRL's and transformers'; what is ours is around them:
reading the document, checkpoints, reports, and the export. torch and its company are imported when a training starts.
"""

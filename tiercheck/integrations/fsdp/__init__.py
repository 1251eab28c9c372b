"""FSDP2: models of ``fully_shard``, whose masters are the local shards of their parameters.

Jobs attach by :func:`tiercheck.integrations.torch.attach`, which sees that a model is sharded.
"""

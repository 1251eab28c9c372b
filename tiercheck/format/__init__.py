"""The shard file: container, header, and host state as msgpack."""

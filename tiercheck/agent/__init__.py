"""The node agent: the movers of a node's ranks, and a server for its neighbours, in a process that outlives the
trainers."""

"""Objects as files of a directory: ``nvme://`` on a disk of the node, ``lustre://`` on one that many nodes mount."""

"""Whole clusters in virtual time: the production decisions against a model of etcd, nodes and workers."""

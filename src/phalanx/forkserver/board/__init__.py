"""The shared memory of a node: the status slots of its workers, and the ledger of their calls.

Workers write it, and the agent and other workers read it.
"""

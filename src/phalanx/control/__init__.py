"""The control plane between the agents of a run: discovery, authentication and messages. One leader, any number of
members.
"""

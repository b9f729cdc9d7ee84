"""A shop for language-model agents: catalogue, tasks, search, state machine, reward, service and client.

A library first (`shop_env.session` is a pure state machine), an HTTP service second. It imports nothing of the training code, so any
agent can use it.
"""

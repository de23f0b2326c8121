"""Collectives: what the members of a gang, one function on several workers, compute together.

`replica` is the user's API, `algorithms` who sends what to whom, `mailbox` what has arrived and what is awaited.
`links` sends to other members and `incoming` receives from them, both over `core.transport`.
"""

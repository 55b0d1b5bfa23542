"""Real daemons: what their work costs, and whether simulated ones do what they do.

fleet    daemons on a core each, and the gateway
client   a question, and when its answer came
measure  costs
replay   clients that ask what a workload says
check    what they got, compared with what is simulated
"""

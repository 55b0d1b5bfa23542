"""Simulates several daemons behind a gateway, from times measured of one: `scripts/simulate_scale`.

    costs       what a daemon's work takes, as functions of tokens; measured by `measure`
    workload    what agents ask, and when: the same for the simulation and for real clients
    processor   cores that work shares
    worker      one daemon: the scheduler's own policy, caches, steps that take what costs say
    gateway     which worker a conversation goes to
    simulate    users, gateway and workers, run with simpy
    points      figures of several seeds
    summary     hit rate, TTFT, throughput of what was asked
    real        real daemons, to measure and to compare with
    study       what `docs/scale.md` shows; drawn by `plot`

Nothing in `vlm_server` imports this package. Docs: docs/scale.md.
"""

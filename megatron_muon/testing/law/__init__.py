"""The law harness: any fork of Megatron or of this package against one process in plain torch.

A real GPT goes through the real DDP and the real optimizer factory of Megatron on gloo, on any grid
of ranks, in either layout; what it ends with must be what one process computes.

* ``case``: one run, and what a rank holds after it.
* ``model``: the model, its gradients and its parts, written out by hand.
* ``reference``: what a right run ends with, and how far another one is from it.
* ``matrix``: the cases: every cell of the axes, a small cover of them, and what cannot run.
* ``build``, ``backward``, ``counting``, ``writes``, ``job``: one rank's part.
* ``runs``: many cases in few launches.
* ``mutants``: runs that are broken on purpose.

A fork's own law test is a few lines::

    from megatron_muon.testing.law.case import Case
    from megatron_muon.testing.law.reference import violations
    from megatron_muon.testing.law.runs import Runs

    runs = Runs({"TP2 DP2": (4, Case(tp=2, layout="flat"))})

    def test_update_is_that_of_one_process():
        assert violations(runs.case("TP2 DP2"), runs.outcomes("TP2 DP2"), bound=1e-5) == []
"""

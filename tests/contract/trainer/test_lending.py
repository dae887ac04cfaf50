"""Which weights a slice gets that is lent between mini-batches."""

import pytest

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]


class Workers:
    """The trainer's weights, as `DetachActorWorker` keeps them."""

    def __init__(self):
        self.weights, self.saved = "published", {}

    def save_model_to_cpu(self, key):
        self.saved[key] = self.weights

    def restore_model_from_cpu(self, key):
        self.weights = self.saved[key]

    def clear_cpu_model(self, key):
        del self.saved[key]


def test_between_mini_batches_lent_slices_get_the_published_weights():
    import verl.trainer.ppo.v1  # noqa: F401  (brings our trainer in; to begin with a module of ours is a cycle)

    from seamless_verl.verl_adapter.trainer.lending import PublishedWeights

    workers = Workers()
    published = PublishedWeights(workers)
    published.save()
    with published.in_place():
        assert workers.weights == "published"
    workers.weights, published.newer = "after a mini-batch", True

    def fail():
        assert workers.weights == "published"
        raise RuntimeError("the transfer failed")

    with pytest.raises(RuntimeError), published.in_place():
        fail()
    assert workers.weights == "after a mini-batch"
    assert list(workers.saved) == [0]

"""What of a cluster.yaml the planner is told."""

from support.runs import tiny, write_config

from tahq.config_file import load_config
from tahq.models.model_spec import load_spec
from tahq_launch.plan_problem import model_numbers

LLAMA = {"family": "llama", "num_layers": 4, "hidden_size": 64, "num_heads": 2, "intermediate_size": 96}
MATRICES = 4 * 64 * 64 + 3 * 64 * 96
"""Elements of a block's matrices."""


def test_weights_in_fp8_that_are_kept_count_as_memory_of_a_block(tmp_path):
    def block_nbytes(memory: dict) -> float:
        write_config(tmp_path, tiny(model=LLAMA, memory=memory))
        config = load_config(tmp_path / "cluster.yaml")
        return model_numbers(config, load_spec(config.model, vocab_size=256, seq_len=config.data.seq_len)).block_nbytes

    plain = block_nbytes({"activations": "none"})
    kept = block_nbytes({"activations": "coat"})
    made_anew = block_nbytes({"activations": "coat", "coat": {"keep_weight_codes": False}})
    assert (made_anew, kept) == (plain, plain + MATRICES)

"""Pretrain a GPT with Megatron: see megatron_muon.tools.pretrain_gpt for the flags and the data."""

from megatron_muon.tools.pretrain_gpt import main

if __name__ == "__main__":
    main()

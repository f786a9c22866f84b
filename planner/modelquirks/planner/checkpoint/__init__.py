"""What a checkpoint holds: its files found, their headers read, every oddity a finding.

Nothing here imports torch.
"""

"""TRL: its fused LM head on local tokens (:mod:`.fused_head`), and one rollout per group (:mod:`.rollouts`)."""

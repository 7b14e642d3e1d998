"""What the settings of the policy must fit: adapters, sub-policies, snapshots."""

from typing import Any

from gdpo_jax.policy import eight_bit


def check(s: Any) -> None:
  """Raises ValueError, saying what was seen, for a resolved `Settings`."""
  if s.lora_rank < 0:
    raise ValueError(f'lora_rank is at least 0, got {s.lora_rank}.')
  _ = s.lora  # refuses its own mistakes
  _check_subpolicies(s)
  _check_snapshots(s)


def _check_subpolicies(s: Any) -> None:
  for name in ('subpolicy_rank', 'subpolicy_cold_start'):
    if getattr(s, name) < 0:
      raise ValueError(f'{name} is at least 0, got {getattr(s, name)}.')
  if s.subpolicy_every < 1:
    raise ValueError(f'subpolicy_every is at least 1, got {s.subpolicy_every}.')
  if not 0 <= s.subpolicy_isolation <= 1:
    raise ValueError(
      f'subpolicy_isolation is in [0, 1], got {s.subpolicy_isolation}.'
    )
  if s.fusion_entropy_coef < 0:
    raise ValueError(
      f'fusion_entropy_coef must not be negative, got {s.fusion_entropy_coef}.'
    )
  if s.online_head and (
    not s.subpolicy_rank
    or not s.online_dir
    or min(s.online_every, s.online_rows) < 1
    or s.online_rate <= 0
  ):
    raise ValueError(
      'online_head needs sub-policies (subpolicy_rank), a directory '
      '(online_dir), and online_every, online_rows, online_rate above 0.'
    )
  if s.subpolicy_rank and s.has_value_head:
    raise ValueError(
      'sub-policies learn from advantages within a group, and advantage gae '
      'has a value head instead; set subpolicy_rank to 0, or choose another '
      'advantage.'
    )


def _check_snapshots(s: Any) -> None:
  for name, known in (
    ('snapshot_format', eight_bit.FORMATS),
    ('snapshot_use', ('sampling', 'reference')),
  ):
    if getattr(s, name) not in known:
      raise ValueError(
        f'{name} is {getattr(s, name)!r}; choose from {", ".join(known)}.'
      )
  if s.snapshot_every < 0 or s.snapshot_keep < 1:
    raise ValueError(
      f'snapshot_every is at least 0 and snapshot_keep at least 1, got '
      f'{s.snapshot_every} and {s.snapshot_keep}.'
    )
  if not 0 <= s.snapshot_share <= 1:
    raise ValueError(f'snapshot_share is in [0, 1], got {s.snapshot_share}.')
  moving = s.reference_every or s.reference_decay
  as_reference = s.snapshot_every and s.snapshot_use == 'reference'
  if as_reference and (moving or not s.kl_coef):
    raise ValueError(
      'snapshots as references need kl_coef above 0, and no other moving '
      'reference (reference_every, reference_decay).'
    )

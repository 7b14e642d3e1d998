"""What the plan counts, and that it plans the program that is run."""

import dataclasses
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest
from tiny_runs import byte_model, digits, settings, task, train

from gdpo_jax import sampler, sharding
from gdpo_jax.policy.config import PolicyConfig
from gdpo_jax.rewards.pipeline import Reward
from gdpo_jax.train import loop
from gdpo_jax.train.settings import Settings
from launch import compiling, hlo, plan, search

ROOT = pathlib.Path(__file__).parents[1]

# A loop of 3 steps around a product and an all-reduce over 4 devices; an
# asynchronous all-gather; a product in a TPU's form; a loop of unknown length.
PROGRAM = """
HloModule jit_f, entry_computation_layout={()->f32[]}

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%body (state: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %state = (s32[], f32[8,16]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %a = f32[8,16]{1,0} get-tuple-element(%state), index=1
  %w = f32[16,16]{1,0} constant({...})
  %dot = f32[8,16]{1,0} dot(%a, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %reduced = f32[8,16]{1,0} all-reduce(%dot), replica_groups={{0,1,2,3}}, to_apply=%add
  %two = s32[] constant(2)
  %next = s32[] add(%i, %two)
  ROOT %out = (s32[], f32[8,16]{1,0}) tuple(%next, %reduced)
}

%condition (state: (s32[], f32[8,16])) -> pred[] {
  %state = (s32[], f32[8,16]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %n = s32[] constant(6)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

%until (state: (s32[], f32[8,16])) -> pred[] {
  %state = (s32[], f32[8,16]{1,0}) parameter(0)
  ROOT %go = pred[] custom-call(%state), custom_call_target="ask"
}

ENTRY %main () -> f32[] {
  %start = (s32[], f32[8,16]{1,0}) constant({...})
  %three = (s32[], f32[8,16]{1,0}) while(%start), condition=%condition, body=%body
  %open = (s32[], f32[8,16]{1,0}) while(%start), condition=%until, body=%body
  %part = bf16[2,8]{1,0} constant({...})
  %gather = (bf16[2,8]{1,0}, bf16[8,8]{1,0}) all-gather-start(%part), replica_groups=[2,4]<=[8], dimensions={0}, metadata={op_name="jit(f)/once/x"}
  %q = f32[5,1,12]{2,1,0} constant({...})
  %k = f32[12,4,3]{2,1,0} constant({...})
  %heads = f32[5,3,4]{2,1,0} convolution(%q, %k), window={size=3 pad=2_2 rhs_reversal=1}, dim_labels=b0f_io0->b0f
  ROOT %end = f32[] constant(0)
}
"""
LOOP_FLOPS = 2 * 8 * 16 * 16
LOOP_BYTES = 4 * 8 * 16 * 2 * 3 / 4


def test_counts_by_hand():
  c = hlo.count(PROGRAM, unknown_trips=10)
  # 3 known steps (0, 2, 4), 10 others; one window place per output meets data
  product = 2 * 5 * 3 * 4 * 12
  assert c.flops == 13 * LOOP_FLOPS + product
  assert c.unknown_loops == 1
  assert c.collective_bytes == {
    'all-reduce': 13 * LOOP_BYTES,
    'all-gather': 2 * 8 * 8 * 3 / 4,
  }
  assert c.collective_calls == {'all-reduce': 13, 'all-gather': 1}
  apart = hlo.count(PROGRAM, unknown_trips=0, once='once/')
  assert apart.collective_bytes == {'all-reduce': 3 * LOOP_BYTES}
  assert apart.once_bytes == 2 * 8 * 8 * 3 / 4


FUSED = """
HloModule jit_f

%begin (a: bf16[2,8]) -> (bf16[2,8], u32[]) {
  %a = bf16[2,8]{1,0} parameter(0)
  %whole = bf16[8,8]{1,0} all-gather(%a), channel_id=3, replica_groups=[2,4]<=[8], dimensions={0}
  ROOT %started = (bf16[2,8]{1,0}, u32[]) custom-call(%whole), custom_call_target="AsyncCollectiveStart"
}

%meanwhile (a: bf16[2,8], x: f32[4,4]) -> (f32[4,4], bf16[8,8]) {
  %a = bf16[2,8]{1,0} parameter(0)
  %x = f32[4,4]{1,0} parameter(1)
  %dot = f32[4,4]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %whole = bf16[8,8]{1,0} all-gather(%a), channel_id=3, replica_groups=[2,4]<=[8], dimensions={0}
  ROOT %both = (f32[4,4]{1,0}, bf16[8,8]{1,0}) tuple(%dot, %whole)
}

%end (a: bf16[2,8]) -> bf16[8,8] {
  %a = bf16[2,8]{1,0} parameter(0)
  %whole = bf16[8,8]{1,0} all-gather(%a), channel_id=3, replica_groups=[2,4]<=[8], dimensions={0}
  ROOT %done = bf16[8,8]{1,0} custom-call(%whole), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main () -> bf16[8,8] {
  %a = bf16[2,8]{1,0} constant({...})
  %x = f32[4,4]{1,0} constant({...})
  %kernel = f32[4,4]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"block": "128"
}}, metadata={op_name="attend"}
  %one = (bf16[2,8]{1,0}, u32[]) fusion(%a), kind=kCustom, calls=%begin
  %two = (f32[4,4]{1,0}, bf16[8,8]{1,0}) fusion(%a, %x), kind=kCustom, calls=%meanwhile
  %three = (f32[4,4]{1,0}, bf16[8,8]{1,0}) fusion(%a, %x), kind=kCustom, calls=%meanwhile
  ROOT %out = bf16[8,8]{1,0} fusion(%a), kind=kCustom, calls=%end
}
"""


def test_a_collective_in_parts_is_counted_once():
  c = hlo.count(FUSED)
  assert c.collective_calls == {'all-gather': 1}
  assert c.collective_bytes == {'all-gather': 2 * 8 * 8 * 3 / 4}
  assert c.flops == 2 * 2 * 4 * 4 * 4 and c.kernel_calls == 1


def test_groups_in_all_spellings():
  for text, size in (
    ('replica_groups={{0,2},{1,3}}', 2),
    ('replica_groups=[2,8]<=[16]', 8),
    ("replica_groups=mesh['a'=4,'b'=2] {'a'}, use", 4),
    ("replica_groups=mesh['a'=4,'b'=2] {'a','b'}", 8),
    ("replica_groups=mesh['a'=16] {'a':(1)4}", 4),
  ):
    assert hlo._group_size(text) == size, text


def test_the_largest_that_fits_is_found_with_few_questions():
  """Sizes whose memory is 2 + 3 * size, and a little more."""
  sizes = [1, 2, 4, 8, 16, 32, 64]

  def asked(limit, first, bend=0.0):
    tried = []

    def memory(size):
      tried.append(size)
      return 2 + 3 * size + bend * size**2

    return search.largest(first, sizes, memory, limit), tried

  assert asked(100, 4) == (32, [4, 8, 32])
  assert asked(1000, 4) == (64, [4, 8, 64])
  assert asked(8, 4) == (2, [4, 2])
  assert asked(5, 32) == (1, [32, 16, 1])
  assert asked(4, 4) == (None, [4, 2])
  # A bend makes the line too hopeful: it is asked again, closer by.
  assert asked(110, 4, bend=0.02) == (16, [4, 8, 32, 16])


def test_a_refusal_in_short():
  said = 'RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory '
  said += (
    'required for HLO temporaries (43.77G) exceeds available HBM (15.75G).'
  )
  assert compiling.refusal(said) == 'needs 43.77G of 15.75G'
  assert compiling.refusal('another\nmessage') == 'another'
  part = compiling.Part(1, 0, None, None, 0.0, compiling.refusal(said))
  assert part.needed == int(43.77 * 2**30) and part.total is None


SHAPE = PolicyConfig(
  family='qwen2',
  vocab_size=1024,
  width=64,
  num_layers=3,
  num_heads=4,
  num_kv_heads=2,
  head_dim=16,
  mlp_width=128,
  qkv_bias=True,
)


def test_parameters_per_device_are_those_of_the_arithmetic():
  mesh = sharding.make_mesh(1, 2, 2)
  s = Settings(mesh_fsdp=2, mesh_tensor=2, mesh_data=1).resolve()
  made = plan.Plan(SHAPE, s, mesh)
  arithmetic = 4 * SHAPE.num_params / 4
  assert plan.bytes_per_device(made.params) == pytest.approx(
    arithmetic, rel=0.05
  )
  # Adam has two moments of each parameter.
  assert plan.bytes_per_device(made.state.opt) == pytest.approx(
    2 * arithmetic, rel=0.05
  )


def test_the_estimate_for_a_gpu_says_what_it_is():
  s = Settings(prompts_per_step=8, mesh_fsdp=4, mesh_data=1).resolve()
  said = plan.estimate(SHAPE, s, 4, 80)
  assert 'ESTIMATED from shapes' in said and 'fits' in said
  with pytest.raises(ValueError, match='exactly 8 devices'):
    plan.estimate(SHAPE, s, 8, 80)


@pytest.fixture(scope='module')
def lowered_by_a_run(tmp_path_factory):
  """(settings, config, text of the train step, text of the rollout)."""
  trained, sampled = [], []
  make, generate = loop.make_train_step, sampler.generate_arrays

  def spied(*args):
    train_step = make(*args)

    def call(*arrays):
      trained.append(train_step.lower(*arrays).as_text())
      return train_step(*arrays)

    return call

  def spied_rollout(*args):
    sampled.append(generate.lower(*args).as_text())
    return generate(*args)

  s = settings(num_steps=1, mesh_data=1, mesh_fsdp=2, mesh_tensor=2)
  policy, params = byte_model()
  one = task(Reward(digits))  # the state of a plan is that of one reward
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(loop, 'make_train_step', spied)
    patch.setattr(sampler, 'generate_arrays', spied_rollout)
    directory = tmp_path_factory.mktemp('lowered')
    train((policy, params), directory, s, the_task=one, heldout=[])
  (step,), (rollout,) = trained, sampled
  return s.resolve(), policy.config, step, rollout


def planned(config, s):
  sizes = s.mesh_data, s.mesh_fsdp, s.mesh_tensor
  return plan.Plan(config, s, sharding.make_mesh(*sizes))


def test_the_plan_lowers_the_train_step_that_the_run_compiles(lowered_by_a_run):
  """On an equal mesh, text by text; a step that differs would be planned wrong."""
  s, config, step, _ = lowered_by_a_run
  lowered, _ = planned(config, s).lower_train_step()
  assert step == lowered.as_text()
  other = dataclasses.replace(s, clip_low=0.1)
  changed, _ = planned(config, other).lower_train_step()
  assert step != changed.as_text()


def functions(text):
  """Of one jitted function each, by name; values numbered as they come."""
  found = re.findall(r'func\.func private @(\w+)(.*?)\n  \}', text, re.DOTALL)
  out = {}
  for name, body in found:
    number = {}
    for value in re.findall(r'%\w+', body):
      number.setdefault(value, f'%{len(number)}')
    body = re.sub(r'%\w+', lambda m, number=number: number[m[0]], body)
    out[name] = re.sub(r'@(\w+?)_\d+\b', r'@\1', body)
  return out


def test_the_plan_lowers_the_decode_step_that_the_run_compiles(
  lowered_by_a_run,
):
  """With the weights of the rollout; the run has it inside of a loop."""
  s, config, _, rollout = lowered_by_a_run
  run = functions(rollout)
  for dtype, same in (('float32', True), ('bfloat16', False)):
    other = dataclasses.replace(s, rollout_dtype=dtype)
    lowered, _ = planned(config, other).lower_decode_step()
    mine = functions(lowered.as_text())
    for name in ('decode', 'unstack'):
      assert (run[name] == mine[name]) == same, name


def test_the_weights_of_a_rollout_are_gathered_once():
  """Each over `fsdp`, none inside of the loop over tokens, and no rows."""
  mesh = sharding.make_mesh(1, 4, 1)
  config = dataclasses.replace(SHAPE, tied=True)
  made = plan.Plan(config, Settings(mesh_data=1, mesh_fsdp=4).resolve(), mesh)
  rows, num_prompts, group = sharding.rows(mesh), 4, 2

  def array(*shape, dtype='int32'):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=rows)

  of_row = array(num_prompts * group)
  lowered = sampler.generate_arrays.lower(
    made.policy,
    made.params,
    array(num_prompts, 8),
    array(num_prompts, 8, dtype='bool'),
    of_row,
    of_row,
    jax.random.key(0),
    sampler.Sampling(group, 40),
    mesh,
  )
  found = hlo.count(lowered.compile().as_text(), unknown_trips=1000)
  matrices = [x for x in jax.tree.leaves(made.params) if x.ndim > 2]
  matrices.append(made.params['embed']['embedding'])
  whole = 4 * sum(x.size for x in matrices)
  # norms and biases are split nowhere, or too small to matter
  assert found.collective_bytes['all-gather'] == pytest.approx(
    whole * 3 / 4, rel=0.02
  )
  # at each token the devices agree whether a row is left, and on nothing else
  assert found.collective_bytes.keys() == {'all-gather', 'all-reduce'}
  assert found.collective_bytes['all-reduce'] < 1000 * 16


@pytest.mark.slow
def test_work_and_traffic_of_a_device_are_flat_from_2_to_64_devices():
  done = subprocess.run(
    [sys.executable, '-m', 'launch.weak_scaling'],
    cwd=ROOT,
    env={k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  spread = re.search(r'Largest spread .*: ([\d.]+)%', done.stdout)
  assert float(spread[1]) < 10, done.stdout


def test_a_tpu_topology_without_a_tpu():
  pytest.importorskip(
    'libtpu', reason='libtpu is in the [tpu] extra; it takes over jax.devices'
  )
  devices = compiling.topology_devices('v5e:4x4')
  assert len(devices) == 16 and devices[0].device_kind in compiling.HBM_GIB
  with pytest.raises(ValueError, match='such as v5e:4x4'):
    compiling.topology_devices('v5e:nonsense')

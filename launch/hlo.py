"""Counts in the text of a compiled program: matrix FLOPs and collectives.

XLA's own cost analysis looks into a loop once, however often it runs; here the
body of a loop counts as often as its trip count says. A program is that of one
device, so all numbers are per device.

  dots         2 x elements of the result x elements that are summed over
  collectives  bytes that a device sends when n devices do it in a ring, for a
               result (all-reduce, all-gather, ...) of S bytes:
               all-gather (n-1)/n S       all-reduce 2 (n-1)/n S
               reduce-scatter (n-1) S     all-to-all (n-1)/n S
               collective-permute S
"""

import collections
import dataclasses
import math
import re

import numpy as np

_BYTES = {
  'pred': 1, 's8': 1, 'u8': 1, 's16': 2, 'u16': 2, 'bf16': 2, 'f16': 2,
  's32': 4, 'u32': 4, 'f32': 4, 's64': 8, 'u64': 8, 'f64': 8,
}  # fmt: skip
_SHAPE = re.compile(r'\b([a-z]+\d*)\[([\d,]*)\]')
_COMPUTATION = re.compile(r'^(ENTRY\s+)?%?([\w.\-]+)\s*\(.*\)\s*->.*\{\s*$')
_INSTRUCTION = re.compile(r'^\s*(?:ROOT\s+)?%?([\w.\-]+)\s*=\s*(.*)$')
_OPCODE = re.compile(r'(?<![\w.%\-])([a-z][\w\-]*)\(')
_CALLED = re.compile(r'\b(calls|to_apply|body|condition)=%?([\w.\-]+)')
_BRANCHES = re.compile(r'branch_computations=\{([^}]*)\}')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_KINDS = (
  'all-gather',
  'all-reduce',
  'reduce-scatter',
  'all-to-all',
  'ragged-all-to-all',
  'collective-permute',
  'collective-broadcast',
)


@dataclasses.dataclass
class Counts:
  """Per device; loops of unknown length are counted `unknown_trips` times.

  `once_bytes`: sent by what `count` was told to count apart.
  """

  flops: float = 0.0
  collective_bytes: dict[str, float] = dataclasses.field(default_factory=dict)
  collective_calls: dict[str, float] = dataclasses.field(default_factory=dict)
  unknown_loops: int = 0
  once_bytes: float = 0.0
  kernel_calls: float = 0.0  # of programs of their own, whose work is not seen
  buffer_bytes: float = 0.0  # of what collectives work on, whatever n is

  @property
  def total_bytes(self) -> float:
    return sum(self.collective_bytes.values())


@dataclasses.dataclass
class _Instruction:
  name: str
  result: str  # the text of its shape
  opcode: str
  operands: str
  attributes: str


def count(
  text: str, unknown_trips: float = 1, once: str | None = None
) -> Counts:
  """Counts of the entry computation of `compiled.as_text()`.

  Args:
    unknown_trips: of loops whose length the text does not say.
    once: collectives of operations whose name this pattern finds are counted
      in `once_bytes` alone.
  """
  computations, entry = _parse(text)
  begun = _begun(computations)
  memo: dict[str, Counts] = {}

  def visit(name: str) -> Counts:
    if name in memo:
      return memo[name]
    total = Counts(
      collective_bytes=collections.defaultdict(float),
      collective_calls=collections.defaultdict(float),
    )
    memo[name] = total
    instructions = computations.get(name, {})
    for op in instructions.values():
      kind = op.opcode.removesuffix('-start')
      if kind in ('dot', 'convolution'):
        total.flops += _product_flops(op, instructions)
      elif 'custom_call_target="tpu_custom_call"' in op.attributes:
        total.kernel_calls += 1
      elif kind in _KINDS and begun.get(_channel(op), name) != name:
        pass  # a part of one that is counted where it begins
      elif kind in _KINDS and once and re.search(once, op.attributes):
        total.once_bytes += _ring_bytes(kind, op)
      elif kind in _KINDS and not op.opcode.endswith('-done'):
        total.collective_bytes[kind] += _ring_bytes(kind, op)
        total.collective_calls[kind] += 1
        total.buffer_bytes += _buffer_bytes(kind, op)
      trips = 1.0
      if op.opcode == 'while':
        known = _trip_count(op, computations)
        trips = unknown_trips if known is None else known
        total.unknown_loops += known is None
      called = [
        target
        for role, target in _CALLED.findall(op.attributes)
        # a reducer runs inside its reduction and holds no products
        if not (role == 'to_apply' and op.opcode != 'call')
      ]
      if branches := _BRANCHES.search(op.attributes):
        called += re.findall(r'[\w.\-]+', branches[1])
      for target in called:
        inner = visit(target)
        total.flops += trips * inner.flops
        total.unknown_loops += inner.unknown_loops
        total.once_bytes += trips * inner.once_bytes
        total.kernel_calls += trips * inner.kernel_calls
        total.buffer_bytes += trips * inner.buffer_bytes
        for mine, theirs in (
          (total.collective_bytes, inner.collective_bytes),
          (total.collective_calls, inner.collective_calls),
        ):
          for key, value in theirs.items():
            mine[key] += trips * value
    return total

  found = visit(entry)
  return dataclasses.replace(
    found,
    collective_bytes=dict(found.collective_bytes),
    collective_calls=dict(found.collective_calls),
  )


def _begun(computations):
  """{channel: fused computation in which its collective begins}.

  A TPU takes a collective apart and fuses the parts with the products that run
  meanwhile; every part is printed as the whole.
  """
  return {
    _channel(op): name
    for name, instructions in computations.items()
    if any(
      'AsyncCollectiveStart' in x.attributes for x in instructions.values()
    )
    for op in instructions.values()
    if op.opcode in _KINDS
  }


def _channel(op):
  found = re.search(r'channel_id=(\d+)', op.attributes)
  return found and found[1]


def _parse(text):
  computations, entry, current = {}, None, None
  for line in text.splitlines():
    if started := _COMPUTATION.match(line):
      current = computations.setdefault(started[2], {})
      entry = started[2] if started[1] else entry
    elif line.rstrip() == '}':  # metadata of kernels has lines of its own
      current = None
    elif current is not None and (found := _INSTRUCTION.match(line)):
      name, rest = found[1], found[2]
      opcode = _OPCODE.search(rest)
      if opcode is None:
        continue
      inside, after = _matching(rest, opcode.end() - 1)
      current[name] = _Instruction(
        name, rest[: opcode.start()], opcode[1], inside, after
      )
  if entry is None:
    raise ValueError('this text has no ENTRY computation; is it HLO?')
  return computations, entry


def _matching(text, start):
  """What stands inside the parenthesis at `start`, and what comes after."""
  depth = 0
  for at in range(start, len(text)):
    depth += (text[at] == '(') - (text[at] == ')')
    if depth == 0:
      return text[start + 1 : at], text[at + 1 :]
  return text[start + 1 :], ''


def _shapes(text):
  """[(dtype, sizes)] of every array in the text of a shape."""
  return [
    (dtype, [int(n) for n in sizes.split(',') if n])
    for dtype, sizes in _SHAPE.findall(text)
    if dtype in _BYTES
  ]


def _operand_sizes(op, instructions):
  """Sizes of the two operands, printed with them or where they are made."""
  inline = _shapes(op.operands)
  if len(inline) >= 2:
    return inline[0][1], inline[1][1]
  names = re.findall(r'%?([\w.\-]+)', op.operands)[:2]
  return [_shapes(instructions[name].result)[0][1] for name in names]


def _product_flops(op, instructions):
  out = math.prod(_shapes(op.result)[0][1])
  left, right = _operand_sizes(op, instructions)
  if op.opcode == 'dot':
    axes = re.search(r'lhs_contracting_dims=\{([\d,]*)\}', op.attributes)
    summed = [int(n) for n in axes[1].split(',') if n] if axes else []
    return 2.0 * out * math.prod(left[axis] for axis in summed)
  # A TPU writes products as convolutions. Its batch axes and its heads are
  # spatial axes there, padded or dilated so that one tap meets an input.
  labels = re.search(r'dim_labels=(\w+)_(\w+)->(\w+)', op.attributes)
  window = re.search(r'window=\{([^}]*)\}', op.attributes)
  summed = right[labels[2].index('i')]
  fields = dict(re.findall(r'(\w+)=([\dx_\-]+)', window[1])) if window else {}
  for axis, size in enumerate(_numbers(fields.get('size', ''))):
    positions = _shapes(op.result)[0][1][labels[3].index(str(axis))]
    inputs = left[labels[1].index(str(axis))]
    per_axis = {
      name: _numbers(fields[name])[axis] if name in fields else 1
      for name in ('stride', 'lhs_dilate', 'rhs_dilate')
    }
    pad = fields['pad'].split('x')[axis].split('_')[0] if 'pad' in fields else 0
    summed *= _taps(inputs, size, positions, int(pad), **per_axis) / positions
  return 2.0 * out * summed


def _numbers(text):
  return [int(n) for n in text.split('x') if n]


def _taps(inputs, size, positions, pad, *, stride, lhs_dilate, rhs_dilate):
  """Pairs of an output place and a tap of the window that meet an input."""
  place = np.arange(positions)[:, None] * stride
  met = place + np.arange(size) * rhs_dilate - pad
  inside = (met >= 0) & (met <= (inputs - 1) * lhs_dilate)
  return int((inside & (met % lhs_dilate == 0)).sum())


def _ring_bytes(kind, op):
  n = _group_size(op.attributes)
  return _buffer_bytes(kind, op) * {
    'all-reduce': 2 * (n - 1) / n,
    'collective-permute': 1,
    'collective-broadcast': 1,
  }.get(kind, (n - 1) / n)


def _buffer_bytes(kind, op):
  """Of the whole array that a group of devices gathers, reduces or exchanges."""
  arrays = _shapes(op.result)
  if op.opcode.endswith('-start') and len(arrays) > 1:
    # (operands..., results..., contexts...): the second half of the arrays
    arrays = [a for a in arrays if a != ('u32', [])]
    arrays = arrays[len(arrays) // 2 :] if kind != 'all-reduce' else arrays
  size = float(sum(_BYTES[dtype] * math.prod(s) for dtype, s in arrays))
  n = _group_size(op.attributes)
  return size * n if kind == 'reduce-scatter' else size


def _group_size(attributes):
  if iota := re.search(r'replica_groups=\[(\d+),(\d+)\]<=', attributes):
    return int(iota[2])
  if lists := re.search(r'replica_groups=\{\{([\d,]*)\}', attributes):
    return len(lists[1].split(','))
  # mesh['a'=4,'b'=4] {'a'}, or a part of an axis: {'a':(1)2}
  if mesh := re.search(
    r'replica_groups=mesh\[([^]]*)\][^{]*\{([^}]*)\}', attributes
  ):
    sizes = dict(re.findall(r"'([^']*)'=(\d+)", mesh[1]))
    axes = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", mesh[2])
    return math.prod(int(part or sizes[name]) for name, part in axes)
  return 2  # a permutation has pairs


def _trip_count(op, computations):
  """Iterations of a counting loop, or None where the text does not say."""
  if known := _TRIPS.search(op.attributes):
    return int(known[1])
  called = dict(_CALLED.findall(op.attributes))
  condition = computations.get(called.get('condition'), {})
  body = computations.get(called.get('body'), {})
  limits = [
    int(made.operands)
    for made in condition.values()
    if made.opcode == 'constant' and made.operands.lstrip('-').isdigit()
  ]
  compares = [made for made in condition.values() if made.opcode == 'compare']
  if not (len(limits) == len(compares) == 1 and 'LT' in compares[0].attributes):
    return None
  counter = re.search(r'[\w.\-]+', compares[0].operands)[0]
  place = re.search(r'index=(\d+)', condition[counter].attributes)
  results = [made for made in body.values() if made.opcode == 'tuple']
  if not place or not results:
    return None
  # the last tuple of a body is its result
  names = re.findall(r'%([\w.\-]+)', results[-1].operands)
  step = _increment(names[int(place[1])], body, computations)
  return -(-limits[0] // step) if step else None


def _increment(name, body, computations):
  """What a chain of additions, perhaps fused, adds to a counter."""
  made = body.get(name)
  if made is None:
    return 0
  operands = re.findall(r'%([\w.\-]+)', made.operands)
  if made.opcode == 'constant':
    return int(made.operands) if made.operands.isdigit() else 0
  if made.opcode == 'fusion':
    fused = computations.get(dict(_CALLED.findall(made.attributes))['calls'])
    root = list(fused)[-1]
    return _increment(root, fused, computations) + sum(
      _increment(operand, body, computations) for operand in operands
    )
  if made.opcode in ('add', 'copy', 'bitcast'):
    return sum(_increment(operand, body, computations) for operand in operands)
  return 0

//! What a stop pattern will cost, known before the expensive part is done.

use regex_syntax::ast::{
    visit, Ast, ClassSetBinaryOp, ClassSetItem, ClassSetRange, Flag, Flags, GroupKind, Visitor,
};
use regex_syntax::hir::{Hir, HirKind};
use std::convert::Infallible;

/// Ranges of more characters than this count as large.
const LARGE_RANGE: u32 = 256;

/// Ranges of more characters than this count as huge.
const HUGE_RANGE: u32 = 0x8000;

/// A huge part of a class takes so many times longer than other large ones if its case is folded.
const HUGE_FOLDED: usize = 8;

/// How many classes of a pattern take long to build: those of Unicode, wide ranges, and classes made
/// from others (each of which may be case-folded character by character).
pub(crate) fn num_large_classes(pattern: &Ast) -> usize {
    match visit(pattern, LargeClasses::default()) {
        Ok(count) => count,
        Err(never) => match never {},
    }
}

/// How many characters a pattern has when its repetitions are written out; so many walks there are at
/// most between two characters.
pub(crate) fn num_positions(pattern: &Hir) -> u64 {
    match pattern.kind() {
        HirKind::Empty | HirKind::Look(_) | HirKind::Class(_) => 1,
        HirKind::Literal(literal) => literal.0.len() as u64,
        HirKind::Capture(capture) => num_positions(&capture.sub),
        HirKind::Concat(parts) | HirKind::Alternation(parts) => {
            parts.iter().map(num_positions).fold(0, u64::saturating_add)
        }
        HirKind::Repetition(repetition) => {
            let count = repetition.max.unwrap_or(repetition.min).max(1);
            num_positions(&repetition.sub).saturating_mul(u64::from(count))
        }
    }
}

#[derive(Default)]
struct LargeClasses {
    count: usize,
    /// Classes that hold most of Unicode and are part of others.
    num_huge: usize,
    /// Whether case is ignored anywhere: such parts are then folded character by character.
    folds_case: bool,
}

impl Visitor for LargeClasses {
    type Output = usize;
    type Err = Infallible;

    fn finish(self) -> Result<usize, Infallible> {
        let huge = if self.folds_case { HUGE_FOLDED } else { 1 };
        Ok(self.count + self.num_huge * huge)
    }

    fn visit_pre(&mut self, pattern: &Ast) -> Result<(), Infallible> {
        match pattern {
            Ast::ClassUnicode(_) | Ast::ClassPerl(_) => self.count += 1,
            Ast::ClassBracketed(class) => self.count += usize::from(class.negated),
            Ast::Flags(set) => self.note_flags(&set.flags),
            Ast::Group(group) => {
                if let GroupKind::NonCapturing(flags) = &group.kind {
                    self.note_flags(flags);
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn visit_class_set_item_pre(&mut self, item: &ClassSetItem) -> Result<(), Infallible> {
        let (is_large, is_huge) = match item {
            ClassSetItem::Unicode(class) => (true, class.is_negated()),
            ClassSetItem::Perl(class) => (true, class.negated),
            ClassSetItem::Bracketed(class) => (true, class.negated),
            ClassSetItem::Ascii(class) => (false, class.negated),
            ClassSetItem::Range(range) => (width(range) > LARGE_RANGE, width(range) > HUGE_RANGE),
            ClassSetItem::Empty(_) | ClassSetItem::Literal(_) | ClassSetItem::Union(_) => {
                (false, false)
            }
        };
        self.count += usize::from(is_large && !is_huge);
        self.num_huge += usize::from(is_huge);
        Ok(())
    }

    fn visit_class_set_binary_op_pre(&mut self, _: &ClassSetBinaryOp) -> Result<(), Infallible> {
        self.count += 1;
        Ok(())
    }
}

impl LargeClasses {
    fn note_flags(&mut self, flags: &Flags) {
        self.folds_case |= flags.flag_state(Flag::CaseInsensitive) == Some(true);
    }
}

fn width(range: &ClassSetRange) -> u32 {
    u32::from(range.end.c).saturating_sub(u32::from(range.start.c))
}

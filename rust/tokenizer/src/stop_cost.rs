//! What a stop pattern will cost, known before the expensive part is done.

use regex_syntax::ast::{self, visit, Ast, ClassSetBinaryOp, ClassSetItem, ClassSetRange, Visitor};
use regex_syntax::hir::{Hir, HirKind};
use std::convert::Infallible;

/// Ranges of more characters than this count as large.
const LARGE_RANGE: u32 = 256;

/// How many classes of a pattern take long to build: those of Unicode, wide ranges, and classes made
/// from others (each of which may be case-folded character by character).
pub(crate) fn num_large_classes(pattern: &Ast) -> usize {
    match visit(pattern, LargeClasses(0)) {
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

struct LargeClasses(usize);

impl Visitor for LargeClasses {
    type Output = usize;
    type Err = Infallible;

    fn finish(self) -> Result<usize, Infallible> {
        Ok(self.0)
    }

    fn visit_pre(&mut self, pattern: &Ast) -> Result<(), Infallible> {
        let is_large = match pattern {
            Ast::ClassUnicode(_) | Ast::ClassPerl(_) => true,
            Ast::ClassBracketed(class) => class.negated,
            _ => false,
        };
        self.0 += usize::from(is_large);
        Ok(())
    }

    fn visit_class_set_item_pre(&mut self, item: &ClassSetItem) -> Result<(), Infallible> {
        let is_large = match item {
            ClassSetItem::Unicode(_) | ClassSetItem::Perl(_) | ClassSetItem::Bracketed(_) => true,
            ClassSetItem::Ascii(class) => class.negated,
            ClassSetItem::Range(range) => is_wide(range),
            ClassSetItem::Empty(_) | ClassSetItem::Literal(_) | ClassSetItem::Union(_) => false,
        };
        self.0 += usize::from(is_large);
        Ok(())
    }

    fn visit_class_set_binary_op_pre(&mut self, _: &ClassSetBinaryOp) -> Result<(), Infallible> {
        self.0 += 1;
        Ok(())
    }
}

fn is_wide(range: &ClassSetRange) -> bool {
    let code = |literal: &ast::Literal| u32::from(literal.c);
    code(&range.end).saturating_sub(code(&range.start)) > LARGE_RANGE
}

//! Layers, boundaries, classes and states of graphs in the style of exporters.

mod build;

use build::{Build, Cache, decoder};
use hpp_graph::{BlockKind, Fold, Graph, StateChange, cut, join, map_block, segment, to_dot};
use hpp_schema::DType;

fn labels(graph: &Graph) -> Vec<String> {
    segment(graph).blocks.into_iter().map(|b| b.label).collect()
}

/// `graph` with meaningless names.
fn nameless(mut graph: Graph) -> Graph {
    for (i, value) in graph.values.iter_mut().enumerate() {
        value.name = format!("t{}", i * 7919 % 10007);
    }
    graph.nodes.iter_mut().for_each(|n| n.name.clear());
    graph
}

#[test]
fn decoders_have_embedding_layers_and_head() {
    for cache in [Cache::Fused, Cache::Appended, Cache::None] {
        for layers in [1, 2, 5] {
            let s = segment(&nameless(decoder(layers, cache)));
            assert_eq!(s.layer_count(), layers, "{cache:?}");
            assert_eq!(
                s.blocks.len(),
                layers + 2,
                "{cache:?} {:?}",
                s.blocks.iter().map(|b| &b.label).collect::<Vec<_>>()
            );
            assert_eq!(s.blocks[0].kind, BlockKind::Embedding);
            assert_eq!(s.blocks[layers + 1].kind, BlockKind::Head);
            assert!(s.boundaries.iter().all(|b| b.values.len() == 1), "{cache:?} {:?}", s.boundaries);
            assert!(s.undecided.is_empty(), "{:?}", s.undecided);
        }
    }
}

#[test]
fn layers_share_a_class_and_map_onto_each_other() {
    let graph = decoder(4, Cache::Fused);
    let s = segment(&graph);
    let classes: Vec<u32> = s.blocks.iter().map(|b| b.class.0).collect();
    assert_eq!(classes, [0, 1, 1, 1, 1, 2]);
    let mapping = map_block(&graph, &s, 1, 3).unwrap();
    for (from, to) in &mapping.nodes {
        assert_eq!(graph.node(*from).op_type, graph.node(*to).op_type);
    }
    let name = |v: &str| graph.find(v).unwrap();
    assert_eq!(mapping.values[&name("wk.0")], name("wk.2"));
    assert_eq!(mapping.values[&name("past.0.value")], name("past.2.value"));
}

#[test]
fn another_attribute_weight_shape_or_edge_is_another_class() {
    let class_of_last_layer = |change: &dyn Fn(&mut Graph)| {
        let mut graph = decoder(3, Cache::Fused);
        change(&mut graph);
        let s = segment(&graph);
        (s.blocks[1].class, s.blocks[3].class)
    };
    let (a, b) = class_of_last_layer(&|_| {});
    assert_eq!(a, b);
    let (a, b) = class_of_last_layer(&|g| {
        let gqa = g.nodes.iter().rposition(|n| n.op_type == "GroupQueryAttention").unwrap();
        g.nodes[gqa].attributes.insert("local_window_size".into(), hpp_graph::Attribute::Int(128));
    });
    assert_ne!(a, b, "attribute");
    let (a, b) = class_of_last_layer(&|g| {
        let up = g.find("up.2").unwrap();
        g.values[up.0 as usize].shape = Some(build::shape("8, 24"));
    });
    assert_ne!(a, b, "weight shape");
    let (a, b) = class_of_last_layer(&|g| {
        let add = g.nodes.iter().rposition(|n| n.op_type == "Add").unwrap();
        g.nodes[add].inputs.reverse();
    });
    assert_ne!(a, b, "edge");
}

#[test]
fn states_pair_by_structure_even_without_names() {
    let graph = nameless(decoder(3, Cache::Appended));
    let s = segment(&graph);
    assert_eq!(s.states.len(), 6);
    for (i, state) in s.states.iter().enumerate() {
        assert_eq!(state.pair.change, StateChange::Append { axis: 2 });
        assert_eq!(state.pair.past, graph.inputs[2 + i]);
        assert_eq!(state.pair.present, Some(graph.outputs[1 + i]));
        assert_eq!(state.layer, Some(i as u32 / 2));
    }
    let fused = segment(&nameless(decoder(2, Cache::Fused)));
    assert!(fused.states.iter().all(|s| s.pair.change == StateChange::SharedBuffer { axis: Some(2) }));
}

#[test]
fn embeddings_and_hidden_states_are_not_paired_as_a_state() {
    let mut b = Build::default();
    b.input("inputs_embeds", DType::Float32, "batch, sequence, 8");
    b.weight("w", "8, 8");
    b.node("MatMul", &["inputs_embeds", "w"], &["y"]);
    b.node("Add", &["inputs_embeds", "y"], &["hidden"]);
    b.typed("hidden", DType::Float32, "batch, sequence, 8");
    b.output("hidden");
    assert!(segment(&b.graph).states.is_empty());
}

#[test]
fn convolution_state_is_replaced() {
    let mut b = Build::default();
    b.input("x", DType::Float32, "batch, 8, sequence");
    b.input("past.0.conv", DType::Float32, "batch, 8, 3");
    b.weight("w", "8, 1, 4");
    b.node_with("Concat", &["past.0.conv", "x"], &["window"], &[("axis", 2)]);
    b.node("Conv", &["window", "w"], &["y"]);
    b.node("Slice", &["window"], &["present.0.conv"]);
    b.typed("present.0.conv", DType::Float32, "batch, 8, 3");
    b.output("y");
    b.output("present.0.conv");
    let s = segment(&b.graph);
    assert_eq!(s.states.len(), 1);
    assert_eq!(s.states[0].pair.change, StateChange::Replace);
    assert_eq!(s.layer_count(), 1);
}

/// A residual network: stem, blocks, head.
fn residual_network(blocks: usize) -> Graph {
    let mut b = Build::default();
    b.input("image", DType::Float32, "batch, 3, 32, 32");
    b.weight("stem", "8, 3, 3, 3");
    b.node("Conv", &["image", "stem"], &["c"]);
    b.node("Relu", &["c"], &["x0"]);
    for i in 0..blocks {
        for (k, from) in [(0, format!("x{i}")), (1, format!("r{i}.0"))] {
            b.weight(&format!("w{i}.{k}"), "8, 8, 3, 3");
            b.node("Conv", &[&from, &format!("w{i}.{k}")], &[&format!("c{i}.{k}")]);
            b.node("Relu", &[&format!("c{i}.{k}")], &[&format!("r{i}.{k}")]);
        }
        b.node("Add", &[&format!("x{i}"), &format!("r{i}.1")], &[&format!("s{i}")]);
        b.node("Relu", &[&format!("s{i}")], &[&format!("x{}", i + 1)]);
    }
    b.node("GlobalAveragePool", &[&format!("x{blocks}")], &["pooled"]);
    b.weight("fc", "8, 10");
    b.node("Gemm", &["pooled", "fc"], &["logits"]);
    b.output("logits");
    b.graph
}

#[test]
fn residual_blocks_of_a_vision_model() {
    let graph = residual_network(3);
    assert_eq!(labels(&graph), ["stem", "blocks.0", "blocks.1", "blocks.2", "head"]);
    let s = segment(&graph);
    assert_eq!(s.blocks[1].class, s.blocks[3].class);
    assert!(s.boundaries.iter().all(|b| b.values.len() == 1));
}

#[test]
fn skips_over_the_whole_model_cross_every_boundary() {
    let mut b = Build::default();
    b.input("x0", DType::Float32, "batch, 8, 32, 32");
    let depth = 12;
    for i in 0..depth {
        b.weight(&format!("d{i}"), "8, 8, 3, 3");
        b.node("Conv", &[&format!("x{i}"), &format!("d{i}")], &[&format!("x{}", i + 1)]);
    }
    b.node("Relu", &[&format!("x{depth}")], &[&format!("y{depth}")]);
    for i in (0..depth).rev() {
        b.weight(&format!("u{i}"), "8, 8, 3, 3");
        b.node("Conv", &[&format!("y{}", i + 1), &format!("u{i}")], &[&format!("z{i}")]);
        b.node("Add", &[&format!("z{i}"), &format!("x{i}")], &[&format!("y{i}")]);
    }
    b.output("y0");
    let s = segment(&b.graph);
    assert!((3..=16).contains(&s.blocks.len()), "{}", s.blocks.len());
    assert!(s.undecided.iter().any(|n| n.contains("skip")), "{:?}", s.undecided);
    let groups: Vec<_> = (0..s.blocks.len()).map(|i| i..i + 1).collect();
    let parts = cut(&b.graph, &s, &groups).unwrap();
    join(&b.graph, &parts, |n| s.weights.is_weight_only(n)).unwrap();
}

#[test]
fn a_long_plain_chain_is_cut_into_a_bounded_number_of_blocks() {
    let mut b = Build::default();
    b.input("x0", DType::Float32, "batch, 8");
    for i in 0..1000 {
        b.weight(&format!("w{i}"), "8, 8");
        b.node("MatMul", &[&format!("x{i}"), &format!("w{i}")], &[&format!("x{}", i + 1)]);
    }
    b.output("x1000");
    let s = segment(&b.graph);
    assert!((64..=128).contains(&s.blocks.len()), "{}", s.blocks.len());
}

/// A partition declares the element types of its inputs. Where each value between two products has an unknown one, both stay in
/// one block.
#[test]
fn values_of_unknown_type_do_not_cross() {
    let mut b = Build::default();
    b.input("x0", DType::Float32, "batch, 8");
    for i in 0..6 {
        b.weight(&format!("w{i}"), "8, 8");
        b.node("MatMul", &[&format!("x{i}"), &format!("w{i}")], &[&format!("y{i}")]);
        b.node("com.example::Mystery", &[&format!("y{i}")], &[&format!("x{}", i + 1)]);
        b.untyped(&format!("x{}", i + 1));
    }
    b.untyped("y3");
    b.output("x6");
    let s = segment(&b.graph);
    let crossing: Vec<_> = s.boundaries.iter().flat_map(|b| &b.values).copied().collect();
    assert_eq!(crossing, ["y0", "y1", "y2", "y4"].map(|name| b.get(name)));
}

#[test]
fn caches_shared_between_layers_cross_boundaries() {
    // Layers 2 and 3 attend to the keys and values of layer 1.
    let mut graph = decoder(4, Cache::None);
    for (layer, k, v) in [(2, "k.1", "v.1"), (3, "k.1", "v.1")] {
        let (key, value) = (graph.find(k).unwrap(), graph.find(v).unwrap());
        redirect(&mut graph, &format!("k.{layer}"), key);
        redirect(&mut graph, &format!("v.{layer}"), value);
    }
    let s = segment(&graph);
    assert_eq!(s.layer_count(), 4);
    let crossing: Vec<usize> = s.boundaries.iter().map(|b| b.values.len()).collect();
    assert_eq!(crossing[2..4], [3, 3], "{crossing:?}");
}

fn redirect(graph: &mut Graph, from: &str, to: hpp_graph::ValueId) {
    let from = graph.find(from).unwrap();
    for consumer in std::mem::take(&mut graph.values[from.0 as usize].consumers) {
        let node = &mut graph.nodes[consumer.0 as usize];
        node.inputs.iter_mut().filter(|v| **v == Some(from)).for_each(|v| *v = Some(to));
        graph.values[to.0 as usize].consumers.push(consumer);
    }
}

#[test]
fn a_later_part_receives_shapes_instead_of_embeddings_or_states() {
    let mut graph = decoder(4, Cache::Appended);
    let shape_of = graph.find("past.0.key").unwrap();
    let made = graph.add_value("past_size", Some(DType::Int64), None, hpp_graph::Origin::Input);
    let node = hpp_graph::Node {
        name: "size_of_past".into(),
        domain: String::new(),
        op_type: "Shape".into(),
        inputs: vec![Some(shape_of)],
        captures: vec![],
        outputs: vec![Some(made)],
        attributes: Default::default(),
    };
    insert_first(&mut graph, node);
    redirect(&mut graph, "mask_real", made);
    let s = segment(&graph);
    assert_eq!(s.layer_count(), 4);
    let parts = cut(&graph, &s, &[0..3, 3..6]).unwrap();
    join(&graph, &parts, |n| s.weights.is_weight_only(n)).unwrap();
    let names: Vec<&str> = parts[1].inputs.iter().map(|v| graph.value(*v).name.as_str()).collect();
    assert!(!names.contains(&"past.0.key") && !names.contains(&"h0") && !names.contains(&"input_ids"), "{names:?}");
    assert!(names.contains(&"past_size") && names.contains(&"size"), "{names:?}");
}

#[test]
fn the_shape_of_a_later_state_is_read_from_one_of_the_same_shape() {
    let mut graph = decoder(4, Cache::Appended);
    let later = graph.find("past.3.key").unwrap();
    let made = graph.add_value("past_size", Some(DType::Int64), None, hpp_graph::Origin::Input);
    let node = hpp_graph::Node {
        name: "size_of_past".into(),
        domain: String::new(),
        op_type: "Shape".into(),
        inputs: vec![Some(later)],
        captures: vec![],
        outputs: vec![Some(made)],
        attributes: Default::default(),
    };
    insert_first(&mut graph, node);
    redirect(&mut graph, "mask_real", made);
    let s = segment(&graph);
    let parts = cut(&graph, &s, &[0..3, 3..6]).unwrap();
    join(&graph, &parts, |n| s.weights.is_weight_only(n)).unwrap();
    assert!(!parts[0].inputs.contains(&later));
    assert_eq!(parts[0].same_shape.get(&later), graph.find("past.0.key").as_ref());
}

/// Puts a node before all others.
fn insert_first(graph: &mut Graph, node: hpp_graph::Node) {
    let nodes = std::mem::take(&mut graph.nodes);
    graph.values.iter_mut().for_each(|v| v.consumers.clear());
    graph.add_node(node);
    for node in nodes {
        graph.add_node(node);
    }
}

#[test]
fn a_model_without_structure_is_one_block() {
    let mut b = Build::default();
    b.input("x", DType::Float32, "n");
    b.node("Relu", &["x"], &["y"]);
    b.output("y");
    let s = segment(&b.graph);
    assert_eq!(s.blocks.len(), 1);
    assert!(!s.undecided.is_empty());
    assert_eq!(segment(&Graph::default()).blocks.len(), 1);
}

#[test]
fn groups_must_cover_the_blocks() {
    let graph = decoder(2, Cache::Fused);
    let s = segment(&graph);
    #[allow(clippy::single_range_in_vec_init)]
    for bad in [vec![], vec![0..2], vec![0..2, 3..4], vec![0..2, 1..4], vec![0..2, 2..9], vec![1..4]] {
        assert!(cut(&graph, &s, &bad).is_err(), "{bad:?}");
    }
}

#[test]
fn dot_shows_blocks_boundaries_and_states() {
    let graph = decoder(2, Cache::Fused);
    let dot = to_dot(&graph, &segment(&graph), Fold::None);
    for part in ["digraph", "embedding", "layers.1", "head", "h1", "past.0.key", "b0 -> b1"] {
        assert!(dot.contains(part), "{part} in\n{dot}");
    }
    assert_eq!(dot.matches('{').count(), dot.matches('}').count());
}

#[test]
fn dot_folds_neighbours_of_one_class() {
    let graph = decoder(12, Cache::Fused);
    let segmentation = segment(&graph);
    let boxes = |fold| {
        to_dot(&graph, &segmentation, fold)
            .lines()
            .filter(|line| line.contains("[label=") && !line.contains("->"))
            .count()
    };
    assert!(boxes(Fold::None) >= 2 * 12 + 2, "a box for each layer and one for its states");
    let folded = to_dot(&graph, &segmentation, Fold::Equal);
    assert!(boxes(Fold::Equal) <= 10 && folded.contains(" blocks, each:"), "{folded}");
    assert!(folded.contains("head") && folded.contains("embedding"), "{folded}");
}

/// Not a benchmark: only an algorithm quadratic in nodes exceeds this bound, even unoptimised.
#[test]
fn a_deep_model_is_segmented_in_linear_time() {
    let graph = decoder(120, Cache::Appended);
    let start = std::time::Instant::now();
    let s = segment(&graph);
    let groups: Vec<_> = (0..s.blocks.len()).map(|i| i..i + 1).collect();
    let parts = cut(&graph, &s, &groups).unwrap();
    join(&graph, &parts, |n| s.weights.is_weight_only(n)).unwrap();
    assert_eq!(s.layer_count(), 120);
    assert!(start.elapsed().as_secs() < 20, "{:?} for {} nodes", start.elapsed(), graph.nodes.len());
}
